"""Train a small BERT on synthetic text with transformers.Trainer, and save it."""

import argparse

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

VOCABULARY, LENGTH = 512, 128


class Phrases(torch.utils.data.Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(5, VOCABULARY, (size, LENGTH), generator=generator)
        self.masked = torch.rand(size, LENGTH, generator=generator) < 0.15

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens, masked = self.tokens[index], self.masked[index]
        return {
            "input_ids": tokens.masked_fill(masked, 4),
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens.masked_fill(~masked, -100),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="trained")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
    )
    arguments = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.steps,
        per_device_train_batch_size=40,
        learning_rate=5e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=BertForMaskedLM(config), args=arguments, train_dataset=Phrases(160))
    result = trainer.train()
    trainer.save_model()
    print("training loss", repr(result.training_loss))


if __name__ == "__main__":
    main()
