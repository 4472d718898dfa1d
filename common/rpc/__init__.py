"""gRPC plumbing that every service uses alike: servers, channels, status mapping, tokens. Knows no service and no policy."""
