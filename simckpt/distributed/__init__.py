"""Several ranks: the only door to torch.distributed. Its modules are imported one by one, for most need torch."""
