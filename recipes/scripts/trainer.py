"""A GPT-2 of transformers, made from a configuration, trained on words by its Trainer."""

import tempfile

import data
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH = 32


class Pieces:
    """Pieces of a text, as a language model of transformers takes them."""

    def __init__(self, words):
        self.pieces = words.unfold(0, LENGTH, LENGTH)

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


seed, batch_size = data.arguments(seed=int, batch_size=int)
set_seed(seed)
train, test = data.words(samples=60_000, vocabulary=1000)
model = GPT2LMHeadModel(GPT2Config(
    n_layer=2, n_head=4, n_embd=64, vocab_size=1000, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
))  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(model, TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=batch_size, num_train_epochs=3, learning_rate=2e-3,
        seed=seed, save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
    ), train_dataset=Pieces(train))  # fmt: skip
    taken = trainer.train().metrics
model.eval()
words = test.unfold(0, LENGTH, LENGTH)
perplexity = cross_entropy(model(words).logits[:, :-1].flatten(0, 1), words[:, 1:].flatten()).exp().item()
rate = taken["train_samples_per_second"] / trainer.args.world_size
print(f"metric {perplexity:.4f} rate {rate:.0f}")
