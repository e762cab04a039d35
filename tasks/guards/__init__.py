"""What raises where a split model would be silently wrong. Techniques load it when they split one.

refusals:   models, arguments, dropout and losses that a split would make wrong
adapters:   which of PEFT's are right, where each rank has its own tokens
training:   what is put in front of PyTorch's clipping, optimizers, DDP and GradScaler
agreement:  what the ranks of a group must share: batches, seeds, sums of gradients
"""
