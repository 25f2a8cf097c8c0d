"""Download checkpoints: resumable transfers, archives and atomic placement."""
