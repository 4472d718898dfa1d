"""The public API: validation, servicers, streams. Knows the wire of octavo.scheduler.v1; decides no policy."""
