"""What is wrong with a checkpoint is said before anything is written, with the file, the name and the remedy."""

import json
import os
import subprocess
from pathlib import Path

import hub_checkpoints as official
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from modeling_mrp.hub import atomic_folder as atomic
from modeling_mrp.hub import convert
from modeling_mrp.hub.convert import convert_checkpoint
from modeling_mrp.hub.errors import HubError
from modeling_mrp.hub.source_config import read_config


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    os.truncate(file, file.stat().st_size - 100)


def lose_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].unlink()


def lose_key_that_the_index_promises(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)


def lose_backbone_key(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"))


def lose_head_key(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("mrp_modules.0.model.hnorm.weight"))


def reshape(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(33)}))


def quantise(folder: Path) -> None:
    key = "model.layers.0.mlp.up_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update({key: torch.zeros(48, 32, dtype=torch.int8)}))


def add_stranger(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(48, 32)}))


def add_second_head(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"mrp_modules.1.model.norm.weight": torch.ones(32)}))


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def two_files_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"x": torch.ones(1)}, folder / "b.safetensors")


def other_model(folder: Path) -> None:
    edit_config(folder, model_type="llama")


def broken_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "sdar"')


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def too_many_layers_declared(folder: Path) -> None:
    edit_config(folder, num_nextn_predict_layers=3)


def untied_head_is_missing(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))


def tied_but_different(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)


def tokenizer_with_code_of_its_own(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "tokenizer_class": "PrivateTokenizer"}))


def mask_elsewhere(folder: Path) -> None:
    edit_config(folder, mask_token_id=270)


@pytest.mark.parametrize(
    ("damage", "shards", "said"),
    [
        (truncate, 1, ["model.safetensors", "truncated", "Download it again"]),
        (truncate, 3, ["model-00003-of-00003.safetensors", "truncated"]),
        (lose_shard, 3, ["model-00001-of-00003.safetensors is missing"]),
        (lose_key_that_the_index_promises, 3, ["lacks", "promises"]),
        (lose_backbone_key, 1, ["1 of 51 tensors are missing", "model.layers.1.self_attn.q_norm.weight"]),
        (lose_head_key, 1, ["mrp.hnorm.weight", "Half a head"]),
        (reshape, 1, ["model.norm.weight", "[33]", "[32]"]),
        (quantise, 1, ["up_proj.weight", "I8", "F32, F16, BF16"]),
        (add_stranger, 1, ["model.layers.7.mlp.up_proj.weight", "does not have"]),
        (add_second_head, 1, ["second head"]),
        (only_pickles, 1, ["pytorch_model.bin", "A pickle can run any code"]),
        (no_weights, 1, ["holds no safetensors file"]),
        (two_files_without_an_index, 1, ["2 safetensors files", "index.json"]),
        (other_model, 1, ["model_type='llama'", "sdar"]),
        (broken_json, 1, ["config.json", "no valid JSON"]),
        (no_config, 1, ["config.json is missing"]),
        (too_many_layers_declared, 1, ["num_nextn_predict_layers=3", "2 layers"]),
        (untied_head_is_missing, 1, ["lm_head.weight", '"tie_word_embeddings": true']),
        (tied_but_different, 1, ["differs from the embeddings", "false"]),
        (tokenizer_with_code_of_its_own, 1, ["tokenizer", "code of its own"]),
        (mask_elsewhere, 1, ["id 259", "mask_token_id=270", "--mask-token-id"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_damage_is_named(tmp_path, damage, shards, said):
    source, out = tmp_path / "source", tmp_path / "out"
    official.write_checkpoint(source, shards=shards)
    damage(source)
    with pytest.raises(HubError) as error:
        convert_checkpoint(source, out)
    for text in said:
        assert text in str(error.value)
    assert not out.exists()
    assert list(tmp_path.iterdir()) == [source]


def test_wrong_arguments_are_named(tmp_path):
    official.write_checkpoint(tmp_path / "source")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for arguments, said in [
        ({"destination": tmp_path / "taken"}, "not empty"),
        ({"destination": tmp_path / "source" / "inside"}, "never written to"),
        ({"destination": tmp_path / "out", "dtype": "int8"}, "float32, float16, bfloat16"),
        ({"destination": tmp_path / "out", "head": tmp_path / "nowhere"}, "neither a folder here nor"),
        ({"destination": tmp_path / "out", "block_length": 0}, "block_size=0"),
    ]:
        with pytest.raises(HubError, match=said):
            convert_checkpoint(tmp_path / "source", **arguments)
    assert not (tmp_path / "out").exists()


def test_an_empty_destination_folder_is_taken_over_with_ordinary_permissions(tmp_path):
    official.write_checkpoint(tmp_path / "source", tokenizer=False)
    (tmp_path / "out").mkdir()
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask


def test_too_small_a_disk_is_refused_before_writing(tmp_path, monkeypatch):
    official.write_checkpoint(tmp_path / "source", tokenizer=False)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(HubError, match=r"0\.00 GB free, and 0\.07 GB are needed"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "source"]


def test_a_disk_that_fills_up_meanwhile(tmp_path, monkeypatch):
    """A real file system of 64 kB; the check beforehand is switched off, as if another process filled the disk."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        official.write_checkpoint(tmp_path / "source", tokenizer=False)
        monkeypatch.setattr(atomic, "_check_room", lambda *_: None)
        with pytest.raises(HubError, match="is full; nothing was left there"):
            convert_checkpoint(tmp_path / "source", small / "out")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_the_misdeclared_block_size_of_the_published_4b_is_said(tmp_path):
    published = {
        **official.DENSE, "hidden_size": 2560, "num_hidden_layers": 36, "head_dim": 128, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 9728, "vocab_size": 151936, "mask_token_id": 151669,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    options = {"head_layers": 2, "mask_token_id": None}
    config, notes = read_config(tmp_path, block_length=None, **options)
    assert config.block_size == 4
    assert any(note.startswith("WARNING: block_size is 4") and "--block-length 16" in note for note in notes)
    config, notes = read_config(tmp_path, block_length=16, **options)
    assert config.block_size == 16
    assert not any("WARNING" in note for note in notes)
    assert any("4 -> 16" in note for note in notes)
    # A plain SDAR checkpoint of block size 4 exists and is right.
    (tmp_path / "config.json").write_text(json.dumps({**published, "architectures": ["SDARForCausalLM"]}))
    _, notes = read_config(tmp_path, block_length=None, head_layers=None, mask_token_id=None)
    assert not any("WARNING" in note for note in notes)


def test_the_command_prints_notes_and_turns_errors_into_messages(tmp_path, capsys, monkeypatch):
    import typer

    app = typer.Typer()
    app.command()(convert.command)
    official.write_checkpoint(tmp_path / "source")
    result = CliRunner().invoke(app, [str(tmp_path / "source"), str(tmp_path / "out"), "--block-length", "8"])
    assert result.exit_code == 0, result.output
    monkeypatch.setattr("sys.argv", ["mrp-convert", str(tmp_path / "source"), str(tmp_path / "out2")])
    with pytest.raises(SystemExit) as ended:
        convert.main()
    assert ended.value.code in (0, None)
    assert "dropped attn_implementation" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        convert.main()
    assert ended.value.code == 1
    assert "not empty" in capsys.readouterr().err
