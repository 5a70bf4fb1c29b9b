"""The Trainer of Hugging Face resumes by skipping batches: exactly if the order is fixed, else the loader refuses."""

from __future__ import annotations

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
answer([fixed, own, taken, said])
"""


def test_a_trainer_that_resumes_reads_each_sample_once_or_is_refused(ranks: Ranks) -> None:
    """It used to read 234 of 1,000 samples twice and 234 never."""
    ((fixed, own, taken, said),) = ranks(TEXT, 1)
    for first, rest in (fixed, own, taken):
        assert sorted(first[:SAMPLES]) == sorted(first[SAMPLES:] + rest) == list(range(SAMPLES))
    assert "quiver_client.integrations.transformers.QuiverCallback()" in said
