"""A self-made certificate for localhost and its key, valid until 2126. For tests only: the key is public by being here."""

from pathlib import Path

KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgpns+uVUbbXgD6s6L
Q2yYX4fWzVF6b9Yhp8AKEB3uAPehRANCAAQLD6y7NmmsMHKrsnZ1drTq7Ed6/kKY
hGZNAuq6/BKAezuDHXRunYowKGM/+Cy3WG2wZ+kyVdJyU8X6ZlKcNaQe
-----END PRIVATE KEY-----
"""

CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBnzCCAUWgAwIBAgIUSdOFkM0HGY/tC1r1qyMUwEzaIR0wCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLb2N0YXZvIHRlc3QwIBcNMjYxMTI5MTk0NDEzWhgPMjEyNjEx
MDUxOTQ0MTNaMBYxFDASBgNVBAMMC29jdGF2byB0ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAECw+suzZprDByq7J2dXa06uxHev5CmIRmTQLquvwSgHs7gx10
bp2KMChjP/gst1htsGfpMlXSclPF+mZSnDWkHqNvMG0wHQYDVR0OBBYEFLwc+aF/
PXbi6nKQwRRbQJMFA2R8MB8GA1UdIwQYMBaAFLwc+aF/PXbi6nKQwRRbQJMFA2R8
MA8GA1UdEwEB/wQFMAMBAf8wGgYDVR0RBBMwEYIJbG9jYWxob3N0hwR/AAABMAoG
CCqGSM49BAMCA0gAMEUCIHxYmvbDLwv3fU9g8mzunFwy3QlTQb7ANe5GJYl9ew7n
AiEAhjxKyNhnDC7yyGRDZTQUv2HLBfpoNmqAnFzE84S16aA=
-----END CERTIFICATE-----
"""


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """The certificate, which is its own authority, and its key, as PEM files."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(KEY)
    return certificate, key
