"""The public API and every policy: requests, batching, block tables. Never imports torch, never touches a KV byte."""
