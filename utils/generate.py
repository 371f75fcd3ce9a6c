"""Text that a language model makes up, to look at."""

import torch


@torch.no_grad()
def generate(model: torch.nn.Module, start: int, length: int, context: int, seed: int) -> list[int]:
    """`length` tokens after the token `start`: drawn one by one, the same for the same weights.

    Args:
        model: gives logits (B, T, V) of the token after each of (B, T); at most `context` of them.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = [start]
    for _ in range(length):
        logits = model(torch.tensor([tokens[-context:]], device=next(model.parameters()).device))
        chances = logits[0, -1].float().softmax(dim=0).cpu()
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    model.train()
    return tokens[1:]
