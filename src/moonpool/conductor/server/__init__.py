"""The conductor's HTTP face: `front` proxies generation as raw bytes, `app` has everything else."""
