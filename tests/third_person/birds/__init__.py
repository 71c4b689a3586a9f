"""A model that knows nothing of mmplan: plain PyTorch."""
