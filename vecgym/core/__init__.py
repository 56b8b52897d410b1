"""What every floor above builds on: checks, errors, files, trees of tensors, random numbers, nodes."""
