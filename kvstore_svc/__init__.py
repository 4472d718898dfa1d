"""The block store of one host: every KV block that is not on a device. Does not know what a prompt is."""
