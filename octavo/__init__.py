"""What a user of Octavo imports: the client, the command line, and the generated gRPC stubs."""

__version__ = "0.1.0"
