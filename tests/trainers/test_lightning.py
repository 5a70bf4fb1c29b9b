"""Lightning and Fabric with our loader, and with a stock one over our dataset: what they wrap, inject and resume."""

from __future__ import annotations

import pytest

from tests.trainers.conftest import Ranks

SAMPLES = 150
pytestmark = pytest.mark.timeout(300)  # several processes that each import Lightning, on a busy machine
BEGIN = """
import logging
os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2")  # as Lightning's launcher does it: no RANK
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lightning.pytorch as pl

from pathlib import Path
from torch.utils.data import RandomSampler, WeightedRandomSampler
stock = torch.utils.data.DataLoader

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.validated = torch.nn.Linear(1, 1), [], []
    def training_step(self, batch):
        for name, part in (batch.items() if "a" in batch else [("", batch)]):
            self.seen.append([self.trainer.current_epoch, rows(part), name])
        return self.layer(torch.ones(1, 1)).sum()
    def validation_step(self, batch, index):
        if not self.trainer.sanity_checking:
            self.validated.append(rows(batch))
    test_step = validation_step
    def predict_step(self, batch):
        return rows(batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trainer(**more):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    more = {"enable_checkpointing": False, **quiet, **more}
    return pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", default_root_dir=folder, **more)
def epoch(module, number, which=""):
    return sum((each for at, each, name in module.seen if at == number and name == which), [])
class Saves(pl.Callback):
    def __init__(self, path, at):
        self.path, self.at = path, at
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if (trainer.current_epoch, index) == self.at:
            trainer.save_checkpoint(self.path)
def ours(size=16, **more):
    return DataLoader(dataset, size, **{"shuffle": True, **more})
def random():
    return ours(shuffle=None, sampler=RandomSampler(dataset, generator=torch.Generator().manual_seed(3)))
"""
END = """
torch.distributed.destroy_process_group()
"""


def whole(parts: list[list[int]]) -> bool:
    """Whether the ranks' parts are of one length and have each sample once."""
    return sorted(row for part in parts for row in part) == list(range(SAMPLES)) and len({*map(len, parts)}) == 1


def test_two_devices_share_each_epoch_whatever_the_trainer_does_with_the_loaders(ranks: Ranks) -> None:
    """The sampler is left as it is; it validates with the loader that it trains with, rebuilds it, limits it, predicts.

    Both ranks used to read each sample, one loader for both purposes raised, and so did a sampler of the user's.
    """
    text = """
said = {}
def fit(name, train, *validate, epochs=2, which=("",), **more):
    module = Module()
    trainer(max_epochs=epochs, **more).fit(module, train, *validate)
    for number in range(epochs):
        for each in which:
            said[f"{name} {number}{each}"] = epoch(module, number, each)
    return module
loader = ours()
assert len(loader) == 10  # it cannot know yet that there are two ranks
fit("ours", loader, use_distributed_sampler=False)
assert len(loader) == 5
fit("stock", stock(dataset, 16, shuffle=True))
loader = ours()
module = fit("same", loader, loader, val_check_interval=2)
for number in range(4):
    said[f"same validated {number}"] = sum(module.validated[5 * number : 5 * number + 5], [])
fit("combined", {"a": ours(), "b": ours(seed=3)}, which=("a", "b"))
fit("random", random())
class Reloads(Module):
    def train_dataloader(self):
        return ours()
module = Reloads()
trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module)
for number in range(3):
    said[f"reloaded {number}"] = epoch(module, number)
module = Module()
said["predicted"] = sum(trainer().predict(module, ours(shuffle=False)), [])
trainer().test(module, ours(shuffle=False), verbose=False)
said["tested"] = sum(module.validated, [])
limited = fit("", ours(), limit_train_batches=3)
overfit = fit("", ours(), overfit_batches=2)
fit("", ours(shuffle=False), overfit_batches=2)
said = {name: value for name, value in said.items() if name[0] != " "}
answer([said, [[epoch(each, number) for number in range(2)] for each in (limited, overfit)]])
"""
    answers = ranks(BEGIN + text + END)
    for name in answers[0][0]:
        assert whole([answer[0][name] for answer in answers]), name
    assert answers[0][0]["reloaded 0"] != answers[0][0]["reloaded 1"]
    for _, (limited, overfit) in answers:
        assert [len(each) for each in limited] == [48, 48]
        assert overfit[0] == overfit[1]
        assert len(overfit[0]) == 32


def test_a_checkpoint_of_two_ranks_resumes_in_mid_epoch_in_two_and_in_one(ranks: Ranks) -> None:
    """Lightning keeps rank 0's state alone, which another rank used to refuse."""
    text = """
said = {}
def resumed(name, make, at=(1, 1)):
    path = Path(folder, f"{name}.ckpt")
    first, rest = Module(), Module()
    trainer(max_epochs=2, callbacks=[Saves(path, at)]).fit(first, make())
    trainer(max_epochs=3).fit(rest, make(), ckpt_path=path, weights_only=False)
    seen = epoch(first, 1)[: 16 * at[1] + 16]
    said[name] = seen + epoch(rest, 1)
    said[f"{name}, next epoch"] = epoch(rest, 2)
    return seen
seen = resumed("ours", ours)
resumed("fixed", lambda: ours(substitute=False))
resumed("workers", lambda: ours(num_workers=1, persistent_workers=True))
resumed("random", random)
class SavesEnds(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(Path(folder, "end.ckpt"))
first, rest = Module(), Module()
trainer(max_epochs=2, callbacks=[SavesEnds()]).fit(first, ours())
trainer(max_epochs=3).fit(rest, ours(), ckpt_path=Path(folder, "end.ckpt"), weights_only=False)
said["end"] = epoch(rest, 2)
loader = ours()
class SavesInValidation(pl.Callback):
    def on_validation_end(self, trainer, module):
        if trainer.current_epoch == 1 and not Path(folder, "same.ckpt").exists():
            trainer.save_checkpoint(Path(folder, "same.ckpt"))
            self.seen = epoch(module, 1)
first, rest, saves = Module(), Module(), SavesInValidation()
trainer(max_epochs=2, val_check_interval=3, callbacks=[saves]).fit(first, loader, loader)
trainer(max_epochs=2).fit(rest, ours(), ckpt_path=Path(folder, "same.ckpt"), weights_only=False)
said["validating with the same loader"] = saves.seen + epoch(rest, 1)
def weighted():
    return ours(shuffle=None, sampler=WeightedRandomSampler(torch.ones(150), 150))
first, rest = Module(), Module()
trainer(max_epochs=1, callbacks=[Saves(Path(folder, "w.ckpt"), (0, 1))]).fit(first, weighted())
trainer(max_epochs=1).fit(rest, weighted(), ckpt_path=Path(folder, "w.ckpt"), weights_only=False)
answer([said, seen, len(epoch(rest, 0))])
sys.stdout.flush()
os._exit(0)
"""
    answers = ranks(BEGIN + text)
    for name in answers[0][0]:
        assert whole([answer[0][name] for answer in answers]), name
    assert [answer[2] for answer in answers] == [75 - 32, 75 - 32], "the rest of a WeightedRandomSampler's draws"
    one = """
os.environ["WORLD_SIZE"] = "1"
def fit(size, path=None, **more):
    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2}
    run = pl.Trainer(accelerator="cpu", devices=1, enable_checkpointing=False, default_root_dir=folder, **quiet, **more)
    run.fit(module, ours(size), ckpt_path=path, weights_only=False)
    return [epoch(module, 0), epoch(module, 1)]
middle = Path(folder, "middle.ckpt")
first = fit(8, callbacks=[Saves(middle, (0, 11))])[0][:96]
answer([fit(16, Path(folder, "ours.ckpt"))[1], first, fit(8, middle), fit(16, middle), fit(4, middle)])
sys.stdout.flush()
os._exit(0)
"""
    [[rest, first, *resumed]] = ranks(BEGIN + one, 1)
    assert sorted(answers[0][1] + answers[1][1] + rest) == list(range(SAMPLES))
    for rest, next_epoch in resumed:  # the end of the epoch used to be lost with batches of another size
        assert sorted(first + rest) == sorted(next_epoch) == list(range(SAMPLES))


def test_what_fabric_sets_up_keeps_its_shares_its_methods_and_its_epoch(ranks: Ranks) -> None:
    """Its wrapper used to lose ``state_dict``, and to begin at epoch 0 again after a resume."""
    text = """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = torch.nn.Linear(1, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
def seen(loader, batches=None):
    got = []
    for number, batch in enumerate(loader, 1):
        fabric.backward(model(torch.ones(1, 1)).sum())
        got += rows(batch)
        if number == batches:
            break
    return got
said = {}
for name, make in {"ours": ours, "stock": lambda: stock(dataset, 16, shuffle=True)}.items():
    loader = fabric.setup_dataloaders(make())
    said |= {f"{name} {number}": seen(loader) for number in range(2)}
    assert len(loader) == 5
def sampled():
    return ours(shuffle=None, sampler=torch.utils.data.DistributedSampler(dataset))
for name, make in {"resumed": ours, "random": random, "dealt": sampled}.items():
    train, validate = fabric.setup_dataloaders(make(), ours(shuffle=False))
    for _ in range(2):
        seen(train)
    first = seen(train, 2)
    fabric.save(Path(folder, name), {"loader": train, "validate": validate, "model": model, "optimizer": optimizer})
    again = fabric.setup_dataloaders(make())
    fabric.load(Path(folder, name), {"loader": again, "model": model}, strict=False, weights_only=False)
    said[name], said[f"{name}, next"] = first + seen(again), seen(again)
    again.set_epoch(9)
    said[f"{name}, named"] = seen(again)
    assert again.state_dict()["epoch"] == 10
answer(said)
"""
    answers = ranks(BEGIN + text + END)
    for name in answers[0]:
        assert whole([answer[name] for answer in answers]), name
    assert answers[0]["ours 0"] != answers[0]["ours 1"]
