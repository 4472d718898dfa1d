"""Models: from a name to a folder, from a folder to a module whose attention is paged."""
