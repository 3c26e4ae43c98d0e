"""Surface of torch.cuda in a kernel without a GPU."""
