"""Pickles in foreign files: no reader executes them, and each error names the refused file."""

import json
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
from safetensors.torch import load_file, save_file

from ludus.engines.models.loading import load_model, load_tokenizer, save_model
from ludus.errors import LudusError, StorageError, UserError
from ludus.tools.search import FolderEncoder
from ludus.training.run.checkpoint import load_shards, save_shards
from ludus.untrusted.pickles import load_pickle
from served import COLD_START
from tests.training.learner.test_learner import learner, tiny_model


class Runs:
    """Unpickling it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "ran")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def mark(tmp_path):
    path = tmp_path / "mark"
    yield path
    assert not path.exists()


@pytest.fixture
def shards(tmp_path):
    one = learner(tiny_model())
    save_shards(tmp_path / "shards", one.scorer.model, one.optimizer, {})
    return tmp_path / "shards"


def like():
    return dict(tiny_model().named_parameters())


def test_shards_are_read_back(shards):
    found = load_shards(shards, "model", like())
    assert found.keys() == like().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in like().items())


def test_shards_that_are_pickles_are_rejected(shards, mark):
    for path in shards.iterdir():
        path.write_bytes(pickle.dumps(Runs(mark)))
    with pytest.raises(StorageError, match=r"broken.*Remove its checkpoint"):
        load_shards(shards, "model", like())


def test_pickled_metadata_beside_shards_are_not_read(shards, mark):
    (shards / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    assert load_shards(shards, "model", like()).keys() == like().keys()


@pytest.mark.parametrize("places", ["no JSON", "{}", '{"model/lm_head.weight": {"saved_offsets": [9, 9]}}'])
def test_foreign_shard_metadata_is_rejected(shards, places):
    (path,) = shards.iterdir()
    save_file(load_file(path), path, {"DCP_SHARDING_INFO": places})
    with pytest.raises(StorageError, match="broken"):
        load_shards(shards, "model", like())


@pytest.mark.parametrize("data", [b"", b"no tensors", pickle.dumps({}), (2**40).to_bytes(8, "little")])
def test_damaged_shard_is_rejected(shards, data):
    (path,) = shards.iterdir()
    path.write_bytes(data)
    with pytest.raises(StorageError, match="broken"):
        load_shards(shards, "model", like())


@pytest.mark.parametrize("kept", [slice(1, None), slice(-1)])
def test_missing_part_of_a_tensor_is_rejected(shards, kept):
    (path,) = shards.iterdir()
    stored = load_file(path)
    name = f"model/{next(iter(like()))}"
    stored[name] = stored[name][kept].contiguous()
    offsets = {key: {"saved_offsets": [0] * tensor.dim()} for key, tensor in stored.items()}
    offsets[name]["saved_offsets"][0] = kept.start or 0
    save_file(stored, path, {"DCP_SHARDING_INFO": json.dumps(offsets)})
    with pytest.raises(StorageError, match=f"broken: it lacks a part of {name}"):
        load_shards(shards, "model", like())


def test_missing_shards_are_rejected(shards):
    shutil.rmtree(shards)
    shards.mkdir()
    with pytest.raises(StorageError, match="broken"):
        load_shards(shards, "model", like())


def torch_file(path, mark):
    torch.save({"weight": Runs(mark)}, path)


def whole_model(folder, mark, model):
    save_model(model, load_tokenizer(str(COLD_START)), folder)
    (folder / "model.safetensors").unlink()
    torch_file(folder / "pytorch_model.bin", mark)
    return lambda: load_model(str(folder))


def encoder(folder, mark, model):
    whole_model(folder, mark, model)
    return lambda: FolderEncoder(folder)


def adapters(folder, mark, model):
    base = folder.with_name("base")
    save_model(model, load_tokenizer(str(COLD_START)), base)
    folder.mkdir()
    said = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    torch_file(folder / "adapter_model.bin", mark)
    return lambda: load_model(str(folder))


@pytest.mark.parametrize("make", [whole_model, encoder, adapters])
@pytest.mark.parametrize("broken", ["code", "empty", "text"])
def test_pickled_weights_that_name_code_are_refused(make, broken, tmp_path, mark, model):
    read = make(tmp_path / "model", mark, model)
    if broken != "code":
        next((tmp_path / "model").glob("*.bin")).write_bytes(b"" if broken == "empty" else b"(lp0\n.")
    with pytest.raises(UserError) as raised:
        read()
    if broken == "code":
        assert "could execute code" in str(raised.value)
    shutil.rmtree(tmp_path / "model")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.T", None]}}),
    ],
)
def test_modules_in_a_model_folder_are_not_imported(file, said, tmp_path, mark, model):
    folder = tmp_path / "model"
    save_model(model, load_tokenizer(str(COLD_START)), folder)
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nC = M = T = object\n")
    found = json.loads((folder / file).read_text()) | said | {"model_type": "of_its_own"}
    (folder / file).write_text(json.dumps(found | {"tokenizer_class": "Own"}))
    for read in (load_model, load_tokenizer):
        with suppress(LudusError):  # `mark` sees what either has run
            read(str(folder))


OF_A_FILE = {
    "a global": pickle.dumps(print),
    "a global of protocol 0": pickle.dumps(print, 0),
    "an instance": b"(i__builtin__\nlist\n.",
    "a persistent id": b"Pone\n.",
    "an extension code": b"\x82\x01.",
    "a class that is changed": pickle.PROTO
    + b"\x04ctorch\nSize\n(N}X\x01\x00\x00\x00aK\x01s"
    + b"t"
    + pickle.BUILD
    + b".",
    "a buffer of 2^60 bytes": b"\x96" + (1 << 60).to_bytes(8, "little") + b".",
    "text of 2^60 bytes": b"\x8d" + (1 << 60).to_bytes(8, "little") + b".",
    "a place far off": b"Nr\xff\xff\xff\xff" + b"\x80\x09.",
    "a number of 100,000 digits": b"I" + b"9" * 100_000 + b"\n.",
    "an end that is missing": pickle.dumps("text")[:-3],
    "nothing on the stack": b".",
    "a call of what cannot be called": b"N)R.",
}


@pytest.mark.parametrize("data", OF_A_FILE.values(), ids=OF_A_FILE)
def test_non_plain_value_is_rejected(data):
    with pytest.raises(UnpicklingError):
        load_pickle(data)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_read(protocol):
    value = {"a": [1, 2.5, "text", None, True, (1, 2)], "b": {}}
    assert load_pickle(pickle.dumps(value, protocol)) == value
