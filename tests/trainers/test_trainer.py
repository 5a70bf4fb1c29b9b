"""The Trainer of Hugging Face resumes by skipping batches: exactly if the order is fixed, else the loader refuses."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.trainers.conftest import Ranks

SAMPLES = 150
TEXT = """
import logging
from pathlib import Path
from transformers import Trainer, TrainingArguments, TrainerCallback
logging.disable(logging.WARNING)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []
    def forward(self, keys):
        self.seen.append(rows({"__key__": keys}))
        return {"loss": self.layer(torch.ones(1, 1)).sum()}
class Ours(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(self.loader)
class Stops(TrainerCallback):
    def on_save(self, args, state, control, **more):
        control.should_training_stop = True
class Keys:
    def __call__(self, samples):
        return {"keys": [sample["__key__"] for sample in samples]}
def train(resume=None, stop=False, state=None, **more):
    loader = DataLoader(dataset, 16, shuffle=True, collate_fn=Keys(), substitute=more.pop("substitute", True))
    if state is not None:
        loader.load_state_dict(state)
    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=2, save_steps=14, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_strategy="no", remove_unused_columns=False, **more)
    model = Model()
    trainer = Ours(model, arguments, callbacks=[Stops()] if stop else [])
    trainer.loader = loader
    trainer.train(resume_from_checkpoint=resume)
    found = loader.state_dict()
    loader.close()
    return sum(model.seen, []), found
checkpoint = str(Path(folder, "checkpoint-14"))  # four batches into the second epoch
fixed = [train(stop=True, substitute=False)[0], train(checkpoint, substitute=False)[0]]
first, state = train(stop=True)
own = [first, train(checkpoint, state=state, ignore_data_skip=True)[0]]
taken = [train(stop=True)[0], train(checkpoint)[0]]
Path(checkpoint, "quiver_loader.pt").unlink()
said = ""
try:
    train(checkpoint)
except RuntimeError as error:
    said = str(error)
from quiver_client import BatchSampler, Mix
from quiver_client.integrations.transformers import FILE, _load
def mixed(weights):
    return BatchSampler(Mix({"many": dataset[:100], "few": dataset[100:]}, weights=weights, epoch=48), 16)
before, after = mixed([3, 1]), mixed([1, 1])
batches = iter(before)
read = {row for _ in range(3) for row in next(batches)}
torch.save(before.state_dict(), Path(folder, FILE))  # at the end of the first epoch
_load(after, Path(folder), 1)
twice = [row for batch in after for row in batch if row in read]
before.close(), after.close()
answer([fixed, own, taken, said, twice])
"""


def test_a_trainer_that_resumes_reads_each_sample_once_or_is_refused(ranks: Ranks) -> None:
    """It used to read 234 of 1,000 samples twice and 234 never."""
    ((fixed, own, taken, said, twice),) = ranks(TEXT, 1, seconds=110)
    for first, rest in (fixed, own, taken):
        assert sorted(first[:SAMPLES]) == sorted(first[SAMPLES:] + rest) == list(range(SAMPLES))
    assert "quiver_client.integrations.transformers.QuiverCallback()" in said
    assert not twice, "the parts of a mixture go on from one epoch to the next"


RANKS = """
import logging
from pathlib import Path
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
from transformers import Trainer, TrainingArguments, TrainerCallback
from quiver_client import BatchSampler
logging.disable(logging.WARNING)
torch.multiprocessing.set_start_method("fork", force=True)  # classes of this script cannot be pickled
stock = torch.utils.data.DataLoader
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.evaluated = torch.nn.Linear(1, 1), [], []
    def forward(self, keys):
        (self.seen if self.training else self.evaluated).append(rows({"__key__": keys}))
        return {"loss": self.layer(torch.ones(1, 1)).sum()}
class Stops(TrainerCallback):
    def __init__(self, saves):
        self.saves = saves
    def on_save(self, args, state, control, **more):
        self.saves -= 1
        control.should_training_stop = self.saves == 0
class Keys:
    def __call__(self, samples):
        return {"keys": [sample["__key__"] for sample in samples]}
class Ours(Trainer):
    make = None
    def get_train_dataloader(self):
        return super().get_train_dataloader() if self.make is None else self.accelerator.prepare(self.make())
    def get_eval_dataloader(self, eval_dataset=None):
        if self.make is None:
            return super().get_eval_dataloader(eval_dataset)
        return self.accelerator.prepare(DataLoader(dataset, 8, collate_fn=Keys()))
def train(name, make, resume=False, saves=0, **more):
    arguments = TrainingArguments(
        output_dir=f"{folder}/{name}", use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
        logging_strategy="no", remove_unused_columns=False, seed=1, per_device_train_batch_size=8,
        **{"num_train_epochs": 2, "save_steps": 3, "dataloader_pin_memory": False, **more})
    model = Model()
    trainer = Ours(model, arguments, train_dataset=dataset, eval_dataset=dataset, data_collator=Keys(),
        callbacks=[Stops(saves)] if saves else [])
    trainer.make = make
    result = trainer.train(resume_from_checkpoint=resume)
    if getattr(make, "close", None):
        make.close()
    return [model.seen, model.evaluated, result.global_step]
def runs(name, make, **more):
    found = [train(name, make, saves=1, **more), train(name, make, True, **more)]
    return [*(each[0] for each in found), found[-1][2]]
def thrice(name, make):
    found = [train(name, make, saves=1), train(name, make, True, 1), train(name, make, True)]
    return [found[0][0] + found[1][0], found[2][0], found[2][2]]
def ours():
    return DataLoader(dataset, 8, shuffle=True, collate_fn=Keys())
def sampled():
    return stock(dataset, batch_sampler=BatchSampler(dataset, 8), collate_fn=Keys(), num_workers=2)
found = {
    "ours": runs("ours", ours, gradient_accumulation_steps=2),
    "sampled": thrice("sampled", sampled),
    "trainer": runs("trainer", None, dataloader_num_workers=2),
}
evaluated = [train("eval", make, eval_strategy="steps", eval_steps=4, max_steps=5, num_train_epochs=1)[:2]
    for make in (ours, None)]
said = ""
try:
    train("ours", ours, resume=f"{folder}/ours/checkpoint-6")  # with another accumulation
except RuntimeError as error:
    said = str(error)
answer([found, evaluated, said])
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.timeout(300)
def test_two_processes_that_stop_and_resume_read_each_sample_once(ranks: Ranks) -> None:
    answers = ranks(RANKS, seconds=280)
    batches = {"ours": [6, 14, 10], "sampled": [6, 14, 20], "trainer": [3, 17, 20]}  # and the optimizer's steps
    for what in answers[0][0]:
        for answer in answers:
            first, rest, steps = answer[0][what]
            assert [len(first), len(rest), steps] == batches[what]
        seen = [answer[0][what][0] + answer[0][what][1] for answer in answers]
        assert list(map(len, seen[0])) == list(map(len, seen[1]))
        for epoch in (slice(10), slice(10, 20)):
            once = sorted(chain(*seen[0][epoch], *seen[1][epoch]))
            if what == "trainer":  # Accelerate fills the last batch with samples of the first
                assert set(once) == set(range(SAMPLES))
            else:
                assert once == list(range(SAMPLES)), what
    for which in (0, 1):
        evaluated = [answer[1][which][1] for answer in answers]
        assert set(chain(*evaluated[0], *evaluated[1])) == set(range(SAMPLES))
        assert len(answers[0][1][which][0]) == 5
    assert all("its loader was in epoch 1, and the Trainer resumes in epoch 0" in answer[2] for answer in answers)
