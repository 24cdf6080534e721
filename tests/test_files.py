"""Files beside the weights: what is there but is no file is not the same as nothing."""

import os
import shutil

import pytest
from says import says
from tokenizer_files import write_config, write_deepseek
from variants import variant

from kdtree import CheckpointError, ConfigError, Engine
from kdtree.config import load as load_config
from kdtree.files import has_file
from kdtree.text import load_chat_template, load_tokenizer

NAMES = ["tokenizer.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja"]


@pytest.fixture(params=["directory", "broken link", "pipe"])
def spoil(request, tmp_path):
    """Puts what is no file in place of one of a model directory's that was whole."""
    write_deepseek(tmp_path)
    write_config(tmp_path, {"chat_template": "x"})
    shutil.copy(variant("base") / "config.json", tmp_path)

    def make(name):
        path = tmp_path / name
        path.unlink(missing_ok=True)
        if request.param == "directory":
            path.mkdir()
        elif request.param == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("nowhere")
        return tmp_path

    return make


@pytest.mark.parametrize("name", NAMES)
def test_text_files(spoil, name):
    directory = spoil(name)
    with says(CheckpointError, directory / name, "is no regular file, wants a file or nothing"):
        load_chat_template(directory, load_tokenizer(directory))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_configs(spoil, name):
    directory = spoil(name)
    with says(ConfigError, directory / name, "is no regular file, wants a file or nothing"):
        load_config(directory)


def test_the_engine_says_so(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(variant("base"), directory)
    (directory / "tokenizer.json").mkdir()
    with says(CheckpointError, directory / "tokenizer.json", "is no regular file"):
        Engine(directory, device="cpu")


def test_a_directory_that_cannot_be_seen(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "lstat", denied)
    with says(ConfigError, tmp_path / "x", "cannot be read", "Permission denied"):
        has_file(tmp_path / "x", ConfigError)
