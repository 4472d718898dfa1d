"""The command line. Knows the client and how processes are started; imports no service."""
