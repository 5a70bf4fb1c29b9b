"""Lightning with our loader: ranks that it assigns late, its checkpoints, and samplers that it would inject."""

from __future__ import annotations

from tests.trainers.conftest import Ranks

SAMPLES = 150
BEGIN = """
import logging
os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2")  # as Lightning's launcher does it: no RANK
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lightning.pytorch as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []
    def training_step(self, batch):
        self.seen.append([self.trainer.current_epoch, rows(batch)])
        return self.layer(torch.ones(1, 1)).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trainer(**more):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    more = {"enable_checkpointing": False, **quiet, **more}
    return pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", default_root_dir=folder, **more)
def epoch(module, number):
    return sum((each for at, each in module.seen if at == number), [])
"""
END = """
torch.distributed.destroy_process_group()
"""


def test_two_devices_share_an_epoch_of_a_loader_made_before_fit(ranks: Ranks) -> None:
    """Both used to read each sample."""
    text = """
loader, module = DataLoader(dataset, 16, shuffle=True), Module()
assert len(loader) == 10  # the loader cannot know yet that there are two
trainer(max_epochs=2, use_distributed_sampler=False).fit(module, loader)
second = Module()
trainer(max_epochs=1).fit(second, DataLoader(dataset, 16, shuffle=True))
answer([epoch(module, 0), epoch(module, 1), epoch(second, 0), len(loader)])
"""
    answers = ranks(BEGIN + text + END)
    for number in range(3):
        assert sorted(answers[0][number] + answers[1][number]) == list(range(SAMPLES))
    assert [each[3] for each in answers] == [5, 5]


def test_a_checkpoint_from_the_end_of_an_epoch_resumes_and_one_from_the_middle_is_refused(ranks: Ranks) -> None:
    text = """
from pathlib import Path
middle, ends = Path(folder, "middle.ckpt"), Path(folder, "ends.ckpt")
class Saves(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.current_epoch == 1 and index == 1:
            trainer.save_checkpoint(middle)
    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(ends)
def loader():
    return DataLoader(dataset, 16, shuffle=True)
first = Module()
trainer(max_epochs=2, callbacks=[Saves()]).fit(first, loader())
second = Module()
trainer(max_epochs=4).fit(second, loader(), ckpt_path=ends, weights_only=False)
third, said = Module(), ""
try:
    trainer(max_epochs=3).fit(third, loader(), ckpt_path=middle, weights_only=False)
except (ValueError, RuntimeError) as error:  # rank 0, whose state it is, gets an error when rank 1 has ended
    said = str(error)
answer([[epoch(first, 1), epoch(second, 2), epoch(second, 3)], sorted({at for at, _ in second.seen}), said])
sys.stdout.flush()
os._exit(0)
"""
    answers = ranks(BEGIN + text)
    for number in range(3):
        assert sorted(answers[0][0][number] + answers[1][0][number]) == list(range(SAMPLES))
    assert [each[1] for each in answers] == [[2, 3], [2, 3]]
    assert "rank=0, and this loader has rank=1" in answers[1][2]
    assert "merge_states of what torch.distributed.all_gather_object gathers" in answers[1][2]


def test_a_checkpoint_from_the_middle_resumes_with_batches_of_any_size(ranks: Ranks) -> None:
    """The end of the epoch used to be lost: its length was that of an epoch read from its beginning."""
    text = """
os.environ["WORLD_SIZE"] = "1"
from pathlib import Path
middle = Path(folder, "middle.ckpt")
class Saves(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == 11 and trainer.current_epoch == 0:
            trainer.save_checkpoint(middle)
def fit(size, path=None, **more):
    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2}
    run = pl.Trainer(accelerator="cpu", devices=1, enable_checkpointing=False, default_root_dir=folder, **quiet, **more)
    run.fit(module, DataLoader(dataset, size, shuffle=True), ckpt_path=path, weights_only=False)
    return [epoch(module, 0), epoch(module, 1)]
first = fit(8, callbacks=[Saves()])[0][:96]
answer([first, fit(8, middle), fit(16, middle), fit(4, middle)])
sys.stdout.flush()
os._exit(0)
"""
    [[first, *resumed]] = ranks(BEGIN + text, 1)
    for rest, whole in resumed:
        assert sorted(first + rest) == sorted(whole) == list(range(SAMPLES))
