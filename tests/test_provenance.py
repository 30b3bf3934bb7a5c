"""Git state of a start: bounded, and without secrets as far as names and forms tell."""

import subprocess
from pathlib import Path

import pytest

from simckpt import provenance

KEY = "sk-" + "abcdefghij0123456789"
TOKEN = "ghp_" + "abcdefghij0123456789"


def git(folder: Path, *arguments: str) -> str:
    identity = [
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "core.hooksPath=/no",
    ]
    done = subprocess.run(["git", *identity, "-C", folder, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A working tree with one commit."""
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("lr = 1\nsteps = 2\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.py").write_text("width = 3\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_clean_tree_has_a_commit_and_no_diff(tree: Path) -> None:
    assert provenance.git_state(tree) == {
        "commit": git(tree, "rev-parse", "HEAD"),
        "dirty": False,
        "diff": "",
        "diff_complete": True,
        "left_out": [],
        "untracked": [],
    }


def test_outside_of_a_tree_there_is_nothing(tmp_path: Path) -> None:
    assert provenance.git_state(tmp_path) is None


@pytest.mark.parametrize("inside", [".", "sub"])
def test_the_diff_of_the_whole_tree_brings_the_commit_to_what_was_run(tree: Path, tmp_path_factory, inside) -> None:
    (tree / "train.py").write_text("lr = 1\nsteps = 20\n")
    (tree / "sub" / "model.py").write_text("width = 4\n")
    git(tree, "add", "sub")  # staged or not
    (tree / "new file.py").write_text("x\n")
    state = provenance.git_state(tree / inside)
    assert state is not None
    assert (state["dirty"], state["diff_complete"], state["untracked"]) == (True, True, ["new file.py"])
    other = tmp_path_factory.mktemp("other")
    git(other, "clone", "-q", str(tree), ".")
    subprocess.run(["git", "-C", other, "apply"], input=state["diff"], text=True, check=True)
    assert (other / "train.py").read_text() == "lr = 1\nsteps = 20\n"
    assert (other / "sub" / "model.py").read_text() == "width = 4\n"


def test_the_users_own_settings_of_git_change_nothing(tree: Path) -> None:
    (tree / "train.py").write_text("lr = 3\n")
    plain = provenance.git_state(tree)
    for name, value in [("diff.noprefix", "true"), ("color.ui", "always"), ("diff.external", "false")]:
        git(tree, "config", name, value)
    assert provenance.git_state(tree) == plain


def test_asking_leaves_the_tree_as_it_is(tree: Path) -> None:
    (tree / "train.py").touch()
    before = (tree / ".git" / "index").read_bytes()
    provenance.git_state(tree)
    assert (tree / ".git" / "index").read_bytes() == before


@pytest.mark.parametrize(
    "name",
    [
        *(".env", ".env.local", "secrets.yaml", "my_token.txt", "credentials.json", "server.pem", "id_rsa", "api.key"),
        *("id_ed25519.pub", ".netrc", "conf/secrets/a.txt", "Passwords.md", "wandb_api_key"),
    ],
)
def test_of_files_with_secret_looking_names_only_the_name_is_kept(tree: Path, name: str) -> None:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("nothing\n")
    git(tree, "add", "-f", name)
    git(tree, "commit", "-qm", "second")
    (tree / name).write_text("hunter2hunter2\n")
    (tree / "train.py").write_text("lr = 5\n")
    state = provenance.git_state(tree)
    assert state is not None
    assert "hunter2" not in state["diff"]
    assert "+lr = 5" in state["diff"]
    assert state["left_out"] == [name]
    assert not state["diff_complete"]


@pytest.mark.parametrize("name", ["tokenizer.py", "keys.py", "environment.py", "monkey.py", "env.py", "train.env.py"])
def test_other_names_are_no_secrets(name: str) -> None:
    assert not provenance.looks_secret(name)


@pytest.mark.parametrize(
    "line",
    [
        f"OPENAI_API_KEY = '{KEY}'",
        f"client({KEY!r})",
        f"x = {TOKEN}",
        "password: swordfish",
        '"secret": "abcdefgh"',
        "AWS_SECRET_ACCESS_KEY=abcdefghijkl",
        "auth_token = 'abcdef1234'",
        "wandb_token: 0123456789abcdef",
        "AKIA" + "ABCDEFGHIJKLMNOP",
        "url = 'https://me:hunter2@example.org/x'",
        "Authorization: Bearer abcdefghijklmnopqrstuvwxyz",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.x",
        "data = 'Zm9vYmFyMTIzNDU2Nzg5MEFCQ0RFRkdISUpLTE1OT1A5'",
    ],
)
def test_lines_that_look_like_secrets_are_left_out(tree: Path, line: str) -> None:
    (tree / "train.py").write_text(f"lr = 1\n{line}\nsteps = 3\n")
    state = provenance.git_state(tree)
    assert state is not None
    assert line not in state["diff"]
    assert f"+{provenance.LEFT_OUT_LINE}" in state["diff"]
    assert "+steps = 3" in state["diff"]
    assert not state["diff_complete"]


@pytest.mark.parametrize(
    "line",
    [
        "max_tokens = 100000",
        "tokens = tokenizer(text)",
        "key = jax.random.key(0)",
        "for key, value in state.items():",
        "self.num_tokens = batch_tokens.sum()",
        "a_very_long_name_of_a_function_with_many_words_in_it(x)",
        "return self.compute_generalized_advantage_estimation_returns()",
    ],
)
def test_ordinary_lines_stay(tree: Path, line: str) -> None:
    (tree / "train.py").write_text(f"{line}\n")
    state = provenance.git_state(tree)
    assert state is not None
    assert f"+{line}\n" in state["diff"]
    assert state["diff_complete"]


def test_a_private_key_is_left_out_whole(tree: Path) -> None:
    lines = ["-----BEGIN RSA PRIVATE KEY-----", "abcdefgh", "ijklmnop", "-----END RSA PRIVATE KEY-----"]
    (tree / "train.py").write_text("\n".join(["a = 1", *lines, "b = 2"]) + "\n")
    state = provenance.git_state(tree)
    assert state is not None
    assert not any(line in state["diff"] for line in lines)
    assert state["diff"].endswith(f"+a = 1\n{f'+{provenance.LEFT_OUT_LINE}{chr(10)}' * 4}+b = 2\n")


def test_removed_and_unchanged_lines_with_secrets_are_left_out_too(tree: Path) -> None:
    (tree / "train.py").write_text(f"lr = 1\nkey = '{KEY}'\nother = '{TOKEN}'\n")
    git(tree, "commit", "-qam", "second")
    (tree / "train.py").write_text(f"lr = 2\nkey = '{KEY}'\n")
    state = provenance.git_state(tree)
    assert state is not None
    assert KEY not in state["diff"]
    assert TOKEN not in state["diff"]


def test_a_long_diff_is_cut_at_a_line(tree: Path) -> None:
    lines = [f"value_{number} = {number}" for number in range(20_000)]
    (tree / "train.py").write_text("\n".join(lines))
    state = provenance.git_state(tree)
    assert state is not None
    size = len(state["diff"].encode())
    assert provenance.DIFF_LIMIT - 100 < size <= provenance.DIFF_LIMIT
    assert state["diff"].endswith("\n")
    assert not state["diff_complete"]


def test_long_lines_and_binary_files_do_not_fill_the_record(tree: Path) -> None:
    (tree / "train.py").write_text("x = 1\n" + "y" * 100_000 + "\nz = 2\n")
    (tree / "sub" / "model.py").write_bytes(bytes(range(256)) * 1000)
    state = provenance.git_state(tree)
    assert state is not None
    assert "+<a line of 100002 bytes was left out>\n+z = 2" in state["diff"]
    assert "Binary files" in state["diff"]
    assert len(state["diff"]) < 1000
    assert not state["diff_complete"]


def test_text_that_is_no_utf_8_is_no_error(tree: Path) -> None:
    (tree / "train.py").write_bytes(b"name = 'caf\xe9'\n")
    state = provenance.git_state(tree)
    assert state is not None
    assert "+name = 'caf\N{REPLACEMENT CHARACTER}'" in state["diff"]


def test_many_untracked_files_are_listed_in_part(tree: Path) -> None:
    for number in range(150):
        (tree / f"{number:03d}.txt").touch()
    (tree / "folder").mkdir()
    (tree / "folder" / "a.txt").touch()
    state = provenance.git_state(tree)
    assert state is not None
    assert state["untracked"] == [f"{number:03d}.txt" for number in range(100)]


def test_the_cpu_is_known_and_no_library_is_imported_for_the_gpus() -> None:
    code = "import sys; from simckpt import provenance; print(provenance.device()); print('torch' in sys.modules)"
    done = subprocess.run([__import__("sys").executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "'gpus': []" in lines[0]
    assert lines[1] == "False"
    assert provenance.device()["cpu"]
