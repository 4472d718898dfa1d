"""Text to token ids and back. Knows tokenizers and templates; knows no wire format, no request and no block."""
