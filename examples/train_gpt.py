"""Train a small character-level GPT on the manual pages that ship with Python (`pydoc_data.topics`), with plain DDP.

    torchrun --nproc-per-node 4 train_gpt.py
    torchrun --nproc-per-node 4 train_gpt.py --steps 1000 --size medium --snapshot gpt.pt     # run again to resume

The loss is in nats per character. A model that knows nothing but how often each character occurs cannot get below the
unigram entropy of the text, which is printed first; this one does within some fifty steps.
"""

import argparse
import math
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class GPTConfig:
    """Sizes of a GPT: `vocab` characters, `context` characters seen at once, `layers` blocks of width `width`."""

    vocab: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float


SIZES = {
    "small": dict(context=64, layers=2, heads=4, width=64),
    "medium": dict(context=128, layers=4, heads=8, width=256),
}


class Block(nn.Module):
    """One pre-norm transformer block with causal self-attention."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """A decoder-only transformer over characters; the output layer shares its weight with the input embedding."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.characters = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.characters.weight
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids, targets):
        """Logits [batch, length, vocab] and the mean cross-entropy (nats) of `targets`, both int64 [batch, length]."""
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_text() -> tuple[torch.Tensor, list[str]]:
    """The text as int64 character numbers [length], and the characters."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    return torch.tensor([number[character] for character in text]), characters


def unigram_entropy(data: torch.Tensor) -> float:
    """Entropy (nats per character) of the character frequencies of `data`."""
    counts = Counter(data.tolist())
    return -sum(n / len(data) * math.log(n / len(data)) for n in counts.values())


def get_batch(data: torch.Tensor, batch: int, context: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """`batch` random pieces of the text and, as targets, the same pieces one character on; both [batch, context]."""
    starts = torch.randint(len(data) - context, (batch,))
    pieces = torch.stack([data[start : start + context + 1] for start in starts])
    return pieces[:, :-1].to(device), pieces[:, 1:].to(device)


@torch.no_grad()
def evaluate(model: nn.Module, data: torch.Tensor, config: GPTConfig, batch: int, device) -> float:
    """Mean loss (nats per character) over evenly spaced pieces of `data`."""
    model.eval()
    pieces = data[: len(data) // (config.context + 1) * (config.context + 1)].view(-1, config.context + 1)
    pieces = pieces[:: max(1, len(pieces) // (8 * batch))].to(device)
    losses = [model(chunk[:, :-1], chunk[:, 1:])[1].item() * len(chunk) for chunk in pieces.split(batch)]
    model.train()
    return sum(losses) / len(pieces)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--snapshot", default="", help="file to save to and to resume from")
    parser.add_argument("--save-every", type=int, default=100)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    data, characters = load_text()
    train, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    config = GPTConfig(vocab=len(characters), dropout=args.dropout, **SIZES[args.size])

    torch.manual_seed(args.seed)
    model = DDP(GPT(config).to(device), device_ids=[device.index] if cuda else None)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )

    def lr_factor(step):
        done = (step - args.warmup) / max(1, args.steps - args.warmup)
        return (step + 1) / args.warmup if step < args.warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, done)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)

    first = 0
    if args.snapshot and os.path.exists(args.snapshot):
        snapshot = torch.load(args.snapshot, map_location=device)
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        schedule.load_state_dict(snapshot["schedule"])
        first = snapshot["step"]
        if rank == 0:
            print(f"resumed from {args.snapshot} at step {first}", flush=True)

    if rank == 0:
        size = sum(p.numel() for p in model.parameters())
        entropy = unigram_entropy(data)
        print(f"{len(data):,} characters, {len(characters)} different, unigram entropy {entropy:.3f} nats")
        print(f"{size:,} parameters, {world} ranks x {args.batch} sequences x {config.context} characters", flush=True)

    started = time.perf_counter()
    for step in range(first, args.steps):
        # Each step draws from a seed of its own, so that a resumed run sees the same batches as one that never stopped.
        torch.manual_seed(args.seed + 1_000_003 * step + rank + 1)
        ids, targets = get_batch(train, args.batch, config.context, device)
        _, loss = model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        done = step + 1
        if rank == 0 and (step == first or done % args.log_every == 0 or done == args.steps):
            ms = (time.perf_counter() - started) / (done - first) * 1000
            print(f"step {done:5d}  loss {loss.item():.4f}  {ms:.0f} ms/step", flush=True)
        if rank == 0 and args.snapshot and (done % args.save_every == 0 or done == args.steps):
            torch.save(
                {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "step": done,
                    "config": asdict(config),
                },
                args.snapshot,
            )

    loss = evaluate(model.module, held_out, config, args.batch, device)
    if rank == 0:
        print(f"loss on text held out: {loss:.4f} nats (unigram entropy {entropy:.3f})", flush=True)
    if cuda:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
