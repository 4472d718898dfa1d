"""The line between the engine's process and the processes of the public edge: one socket each, one message a step.

Knows requests, updates and errors as bytes; knows neither the wire of the public API nor policy.
"""
