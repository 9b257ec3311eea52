"""The README's code runs, and its commands are what they claim."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(code, "README.md", "exec"), {})
    assert "user 2 -> vendor 3 -> item 5" in capsys.readouterr().out


def test_commands_are_marked_for_ci():
    for name in ("demo", "tests"):
        (block,) = re.findall(
            rf"<!-- {name} -->\n```bash\n(.*?)```\n<!-- end {name} -->", README, re.S
        )
        assert "constraints-cpu.txt" in block
    assert block.strip().endswith("-m pytest")
