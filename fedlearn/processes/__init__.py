"""Worker processes: how they are started, forked and watched, and how none outlives its parent."""
