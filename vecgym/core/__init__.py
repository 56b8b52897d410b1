"""The lowest floor: checks, errors, files, trees of tensors, random numbers, nodes."""
