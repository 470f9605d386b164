"""Configurations: validation, JSON, files."""

import json
from dataclasses import replace

import numpy as np
import pytest
from variants import CASES, model_config

import kvjax
from kvjax.attention import GroupedQuery, Kronecker, PathResidual
from kvjax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
    differences,
    from_dict,
    load,
    register,
    save,
    to_dict,
)
from kvjax.config_files import load_config

CONFIG = Config(model=model_config(CASES["kpa"].attention), train=TrainConfig(steps=3000, batch_size=8),
                optimizer=OptimizerConfig(clip_norm=None), mesh=MeshConfig(tensor=2))


@pytest.mark.parametrize(("build", "message"), [
    (lambda: GroupedQuery(heads=6, kv_heads=4, head_dim=8), "heads 6 is not a multiple of kv_heads 4"),
    (lambda: GroupedQuery(heads=6, kv_heads=3, head_dim=7), "head_dim 7 is odd"),
    (lambda: GroupedQuery(heads=0, kv_heads=1, head_dim=8), "heads is 0"),
    (lambda: Kronecker(h1=2, h2=2, d1=2, d2=3), "d2 is 3: it must be even"),
    (lambda: Kronecker(h1=2, h2=2, k_rank=0), "k_rank is 0"),
    (lambda: model_config(CASES["kpa"].attention, layers=0), "ModelConfig.layers is 0"),
    (lambda: model_config(CASES["kpa"].attention, dtype="bf16"), "'bf16': choose one of float32.*bfloat16"),
    (lambda: model_config(CASES["kpa"].attention, dropout=1.0), "dropout is 1.0"),
    (lambda: model_config(CASES["kpa"].attention, window=0), "window is 0"),
    (lambda: model_config(CASES["kpa"].attention, rope_base=float("inf")), "rope_base is inf: a finite number"),
    (lambda: model_config(CASES["kpa"].attention, window=2.5), "window is 2.5: a whole number or None is wanted"),
    (lambda: model_config(CASES["kpa"].attention, layers=True), "layers is True: a whole number"),
    (lambda: model_config(CASES["kpa"].attention, rope_scaling=3), "rope_scaling is 3: Variant or None"),
    (lambda: GroupedQuery(heads="2", kv_heads=2, head_dim=8), "GroupedQuery.heads is '2': a whole number"),
    (lambda: PathResidual(2, 1.5), "PathResidual.delta is 1.5: a whole number"),
    (lambda: from_dict(Config, {"model": 3, "train": {"steps": 1, "batch_size": 1}}), "Config.model is 3: ModelConfig"),
    (lambda: OptimizerConfig(peak_lr=10**400), "peak_lr is 1000.*: a finite number"),
    (lambda: OptimizerConfig(b1=1.0), "b1 is 1.0: it must be at least 0 and below 1"),
    (lambda: OptimizerConfig(weight_decay=float("nan")), "weight_decay is nan: a finite number"),
    (lambda: TrainConfig(steps=1, batch_size=1, seed=-1), "seed is -1"),
    (lambda: TrainConfig(steps=1, batch_size=1, seed=10**20), "seed is 100000000000000000000"),
    (lambda: OptimizerConfig(schedule="cosin"), "did you mean 'cosine'"),
    (lambda: OptimizerConfig(final_lr_fraction=2), "final_lr_fraction is 2"),
    (lambda: DataConfig(validation_fraction=0), "validation_fraction is 0"),
    (lambda: MeshConfig(data=-1, tensor=-1), "only one axis can be -1"),
    (lambda: MeshConfig(data=0), "above 0, or -1"),
    (lambda: CheckpointConfig(every_steps=10, keep_every=15), "multiple of every_steps"),
    (lambda: TrainConfig(steps=1, batch_size=8, accumulation=3), "batch_size 8 is not a multiple of accumulation 3"),
])
def test_bad_values_are_named(build, message):
    with pytest.raises(kvjax.ConfigError, match=message):
        build()


def test_numbers_of_numpy_become_plain(tmp_path):
    train = TrainConfig(steps=np.int64(5), batch_size=1, z_loss=np.float32(0.5))
    save(train, tmp_path / "train.json")
    assert load(TrainConfig, tmp_path / "train.json") == train == TrainConfig(5, 1, z_loss=0.5)


def test_json_round_trip(tmp_path):
    save(CONFIG, tmp_path / "config.json")
    assert load(Config, tmp_path / "config.json") == CONFIG
    assert json.loads((tmp_path / "config.json").read_text())["model"]["attention"]["variant"] == "kronecker"


@pytest.mark.parametrize(("change", "message"), [
    (lambda d: d["model"].update(hights=3), "no field hights"),
    (lambda d: d["model"]["attention"].update(variant="kroneker", module="kvjax.attention"), "'kroneker' is unknown"),
    (lambda d: d["model"]["attention"].update(variant="mine", module="no_such"), "no_such.*does not import"),
])
def test_saved_configurations_that_cannot_be_read_say_why(change, message):
    data = to_dict(CONFIG)
    change(data)
    with pytest.raises(kvjax.ConfigError, match=message):
        from_dict(Config, data)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(kvjax.ConfigError, match="does not exist"):
        load(Config, tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(kvjax.ConfigError, match="not valid JSON"):
        load(Config, tmp_path / "config.json")


def test_differences_name_the_setting():
    other = replace(CONFIG, model=replace(CONFIG.model, attention=replace(CONFIG.model.attention, h1=8)))
    assert differences(CONFIG, other) == {"model.attention.h1": (4, 8)}
    assert differences(CONFIG, CONFIG) == {}


def test_a_variant_name_is_taken_once():
    with pytest.raises(kvjax.ConfigError, match="'kronecker' is taken by kvjax.attention.kronecker.Kronecker"):
        register("kronecker")(type("Other", (GroupedQuery,), {}))


def test_unknown_configurations_name_the_nearest(tmp_path):
    with pytest.raises(kvjax.ConfigError, match="did you mean kpa_353m"):
        load_config("kpa_353")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(kvjax.ConfigError, match="holds no `config"):
        load_config(str(tmp_path / "empty.py"))
