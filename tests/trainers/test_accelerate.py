"""Accelerate with our loader: each sample once, gradients synchronised, and nothing dealt or skipped twice."""

from __future__ import annotations

from tests.trainers.conftest import Ranks

SAMPLES = 150
BEGIN = """
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
from accelerate import Accelerator
"""


def test_a_prepared_loader_gives_each_sample_once_to_one_of_two_ranks(ranks: Ranks) -> None:
    """It used to be dealt twice: 91 of 150 samples per epoch."""
    text = """
loader = DataLoader(dataset, 16, shuffle=True)  # before there is a process group, as in most examples
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(1, 1)
loader, model = accelerator.prepare(loader, model)
epochs = []
for epoch in range(2):
    seen, synchronised, gathered = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            synchronised.append(accelerator.sync_gradients)
        seen += rows(batch)
        gathered += accelerator.gather_for_metrics(torch.tensor(rows(batch))).tolist()
    epochs.append([seen, synchronised, gathered])
for batch in loader:
    break
answer([epochs, len(loader), loader.batch_size, len(loader.sampler), loader.sampler.num_replicas, loader.sampler.rank,
        accelerator.gradient_state.in_dataloader])
accelerator.end_training()
"""
    answers = ranks(BEGIN + text)
    for epoch in range(2):
        seen = [each[0][epoch][0] for each in answers]
        assert sorted(seen[0] + seen[1]) == list(range(SAMPLES))
        for _, synchronised, gathered in (each[0][epoch] for each in answers):
            assert synchronised == [False, False, False, True, True]  # every fourth, and at the end of the epoch
            assert sorted(gathered) == list(range(SAMPLES))
    assert [each[1:] for each in answers] == [[5, 16, 75, 2, rank, False] for rank in range(2)]


def test_batches_are_neither_dealt_nor_skipped_by_accelerate(ranks: Ranks) -> None:
    text = """
from accelerate import skip_first_batches
from torch.utils.data import RandomSampler
from accelerate.data_loader import prepare_data_loader
from quiver_client import BatchSampler
accelerator = Accelerator(cpu=True)
def refused(batches):
    try:
        list(batches)
    except RuntimeError as error:
        return str(error)
stock = torch.utils.data.DataLoader
own = stock(dataset, batch_sampler=BatchSampler(dataset, 16))
alone = stock(dataset, batch_sampler=BatchSampler(dataset, 16, rank=0, world_size=1))
said = [
    refused(prepare_data_loader(DataLoader(dataset, 16, shuffle=True))),  # without the Accelerator that sees the mark
    refused(accelerator.prepare(own)),
    refused(accelerator.prepare(alone)),
    refused(skip_first_batches(DataLoader(dataset, 16, shuffle=True), 2)),
    refused(skip_first_batches(DataLoader(dataset, 16, shuffle=True, substitute=False), 2)),
    refused(skip_first_batches(DataLoader(dataset, 16, sampler=RandomSampler(dataset)), 2)),
]
fixed = DataLoader(dataset, 16, shuffle=True, substitute=False)
before = [batch for batch, _ in zip(map(rows, fixed), range(2))]
resumed = DataLoader(dataset, 16, shuffle=True, substitute=False)
resumed.set_epoch(0)
rest = list(map(rows, skip_first_batches(resumed, 2)))
dealt = BatchSampler(dataset, 15, rank=0, world_size=1, substitute=False)
by_accelerate = list(map(rows, accelerator.prepare(stock(dataset, batch_sampler=dealt))))
from accelerate import DataLoaderConfiguration
dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
def numbers(samples):
    return torch.tensor([row_of[sample["__key__"]] for sample in samples])
def dispatched(**place):
    batches = BatchSampler(dataset, 15, **place)
    return dispatching.prepare(stock(dataset, batch_sampler=batches, collate_fn=numbers))
said.append(refused(dispatched()))
by_rank_0 = torch.cat(list(dispatched(rank=0, world_size=1))).tolist()
try:
    accelerator.prepare(DataLoader(dataset, 16, sampler=RandomSampler(dataset)))
except ValueError as error:
    said.append(str(error))
answer([said, sum(before + rest, []), sum(by_accelerate, []), by_rank_0])
fixed.close()
torch.distributed.destroy_process_group()
"""
    answers = ranks(BEGIN + text)
    for said, *_ in answers:
        assert all("deal them to the ranks again" in each for each in said[:3])
        assert all("loader.load_state_dict(state)" in each for each in said[3:6])
        assert "deal them to the ranks again" in said[6], "by rank 0 reading its own share for all: 502 of 1,003"
        assert "Wrap the sampler in a DistributedSampler" in said[7], "each sample was read by both"
    for which in (1, 2, 3):
        assert sorted(answers[0][which] + answers[1][which]) == list(range(SAMPLES))
