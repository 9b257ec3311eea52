"""`ikbo-tree tune`: what it tries, what it writes, and that calls find it."""

import json

import pytest
import torch
from typer.testing import CliRunner

import ikbo_tree as ikbo
from ikbo_tree import tuning
from ikbo_tree.kernels.common import tuned
from ikbo_tree.kernels.linear_compression.config import choose
from ikbo_tree.kernels.target_attention.config import attention_config

TILE = {"BM": 64, "BN": 64, "BK": 32, "warps": 4, "stages": 2}
KEY = "linear_compression forward sm_90 float16 433 256"


class OutOfResources(Exception):  # noqa: N818 - Triton's name, by which it is known
    pass


@pytest.fixture
def tiles(monkeypatch, tmp_path):
    """Writes a file and makes it the one that is read."""

    def write(content):
        path = tmp_path / "tiles.json"
        path.write_text(content)
        monkeypatch.setenv(tuned.VARIABLE, str(path))
        tuned._file.cache_clear()

    yield write
    monkeypatch.undo()
    tuned._file.cache_clear()


def test_a_file_replaces_the_tile_of_its_call_alone(tiles):
    frozen = choose("forward", "sm_90", torch.float16, 433, 256)
    tiles(json.dumps({"tiles": {KEY: {"tile": TILE, "descriptors": False, "resident": 2}}}))
    found = choose("forward", "sm_90", torch.float16, 433, 256)
    assert (found.tile.BM, found.tile.stages, found.resident) == (64, 2, 2)
    assert found != frozen
    for other in (("partial", 433, 256), ("forward", 433, 128)):
        given = choose(other[0], "sm_90", torch.float16, *other[1:])
        assert given.tile.BM != 64 or given.tile.stages != 2


def test_attention_takes_the_roles_that_a_file_has(tiles):
    frozen = attention_config("sm_90", 2, 128)
    tile = {"rows": 32, "keys": 32, "num_warps": 4, "num_stages": 1}
    tiles(json.dumps({"tiles": {"target_attention queries sm_90 2 128": {"tile": tile}}}))
    found = attention_config("sm_90", 2, 128)
    assert found.queries.rows == 32
    assert (found.forward, found.keys) == (frozen.forward, frozen.keys)
    assert attention_config("sm_90", 2, 64).queries.rows != 32


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tiles": {"a": {}}}', '{"tiles": [1]}'])
def test_a_file_of_something_else_is_refused(tiles, content):
    tiles(content)
    with pytest.raises(ValueError, match="IKBO_TREE_TILES must name a file from `ikbo-tree tune`"):
        choose("forward", "sm_90", torch.float16, 433, 256)


def question(times):
    """Four candidates, each with the time it takes, or an error."""

    def call():
        return (tuned.entry("op", "role") or {"at": "frozen"})["at"]

    def measure(call):
        found = times[call()]
        if isinstance(found, Exception):
            raise found
        return found

    candidates = [{"at": name} for name in times if name != "frozen"]
    return tuning.Question("op role", {"at": "frozen"}, candidates, call), measure


def test_the_fastest_that_fits_is_chosen():
    asked, measure = question({"frozen": 3.0, "a": 2.0, "b": OutOfResources(), "c": 1.9, "d": 2.5})
    found = tuning.answer(asked, measure)
    assert (found.fields["at"], found.best_ms, found.frozen_ms, found.tried) == ("c", 1.9, 3.0, 4)
    assert tuned.entry("op", "role") is None


def test_noise_does_not_replace_the_frozen_tile():
    found = tuning.answer(*question({"frozen": 1.0, "a": 0.99}))
    assert found.fields["at"] == "frozen"


def test_other_errors_are_not_hidden():
    asked, measure = question({"frozen": 1.0, "a": RuntimeError("illegal memory access")})
    with pytest.raises(RuntimeError, match="illegal"):
        tuning.answer(asked, measure)


def run(*arguments):
    import typer

    from ikbo_tree.cli.tune import tune

    app = typer.Typer()
    app.command()(tune)
    return CliRunner().invoke(app, arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu():
    result = run("--op", "linear")
    assert result.exit_code == 2
    assert "needs a GPU" in result.output


@pytest.mark.parametrize("arguments", [("--op", "softmax"), ("--op", "linear", "--dtype", "int8")])
def test_it_refuses_what_it_does_not_know(arguments):
    assert run(*arguments).exit_code == 2


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["linear", "linear_compression", "target_attention"])
def test_a_tuned_call_is_right(op, tmp_path, tiles, monkeypatch):
    """On a GPU, with two candidates: the file is written, found again, and results stay."""
    monkeypatch.setattr(tuning, "_GEMMS", tuning._GEMMS[:2])
    monkeypatch.setattr(tuning, "_ATTENTION", tuning._ATTENTION[:2])
    path = tmp_path / "found.json"
    sizes = ("--M", "48", "--N", "64", "--K", "40,24", "--dim", "64", "--keys", "64")
    result = run("--op", op, "--out", str(path), "--items", "64", "--ratio", "8", *sizes)
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())["tiles"]
    assert all(key.startswith(op) for key in written)
    tiles(path.read_text())
    tree = ikbo.BroadcastTree.from_counts({"item": [3, 5]}, root="user").to("cuda")
    x = {"user": torch.randn(2, 40, 64).cuda().half(), "item": torch.randn(8, 24, 64).cuda().half()}
    w = {"user": torch.randn(48, 40).cuda().half(), "item": torch.randn(48, 24).cuda().half()}
    found = ikbo.linear_compression(x, w, tree=tree, impl="triton")
    expected = ikbo.linear_compression(x, w, tree=tree, impl="reference")
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-2)
