"""What the checkpoint and the GPU dictate."""
