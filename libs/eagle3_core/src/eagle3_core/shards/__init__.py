"""Hidden states on disk: packed samples in safetensors files, listed by manifests."""
