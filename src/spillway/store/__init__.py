"""Where bytes live: the host arena and its slabs, striped extents on disk, and the manifest of what is committed."""
