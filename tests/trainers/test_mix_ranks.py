"""Ranks of one job that read a mixture: what they must agree on, and one state of all of them."""

from __future__ import annotations

from collections import Counter

from tests.trainers.conftest import Ranks

TEXT = """
import torch.distributed as distributed
from quiver_client import BatchSampler, Guided, Mix
distributed.init_process_group("gloo", rank=rank, world_size=2)
odd, even = dataset.select(range(1, 150, 2)), dataset.select(range(0, 150, 2))
def mix_of(first=odd, weights=(2, 1), **more):
    return Mix({"odd": first, "even": even}, weights=weights, epoch=120, part_field="part", **more)
def passes(order, count=2):
    try:
        return [[row for batch in order for row in batch] for _ in range(count)]
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    finally:
        order.close()
        distributed.barrier()
said = [
    passes(BatchSampler(mix_of(), 8)),
    passes(BatchSampler(mix_of(weights=(2, 1 + rank)), 8)),
    passes(BatchSampler(mix_of(seed=rank), 8)),
    passes(BatchSampler(mix_of(first=odd if rank else dataset), 8)),
    passes(BatchSampler(mix_of(guided=rank == 0), 8)),
]
loader = DataLoader(mix_of(), 8, shuffle=True, num_workers=1)
read = []
for number, batch in enumerate(loader):
    read += rows(batch)
    if number == 3:
        break
merged = loader.state_dict(merged=True)
loader.close()
whole = DataLoader(mix_of(), 8, shuffle=True, rank=0, world_size=1)
whole.load_state_dict(merged)
rest = [row for batch in whole for row in rows(batch)]
whole.close()
answer([said, read, rest])
distributed.destroy_process_group()
"""


def test_ranks_read_one_mixture_and_have_one_state(ranks: Ranks) -> None:
    answers = ranks(TEXT)
    for epoch in range(2):
        together = Counter(row for said, _, _ in answers for row in said[0][epoch])
        assert sum(together.values()) == 120
    odd = Counter(row for said, _, _ in answers for epoch in said[0] for row in epoch if row < 75)
    assert sum(odd.values()) == 160
    assert min(odd.values()) == 2, "two passes of 75, shared by two ranks"
    assert max(odd.values()) <= 4, "and the beginning of a third; each pass repeats one sample to even the ranks out"
    for which, name in ((1, "weights"), (2, "mix_seed"), (3, "dataset"), (4, "guided")):
        refused = [said[which] for said, _, _ in answers if isinstance(said[which], str)]
        assert refused, "one of the two raises, or both"
        assert all(each.startswith(f"Misconfigured: {name}: ") for each in refused), refused
    (_, first, rest), (_, second, same) = answers
    assert rest == same
    assert len(first) == len(second) == 32
    read = [*first, *second]
    assert len(set(read)) == 64
    assert len(rest) == 120 - 64
    odd_read = {row for row in read if row % 2}
    missing = 75 - len(odd_read)
    assert {row for row in rest if row % 2} | odd_read == set(range(1, 150, 2)) or missing > len(rest) // 2
    assert max(Counter([*read, *rest]).values()) <= 2
