"""Git state of a start: bounded, and without secrets as far as names and forms tell."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from simckpt import provenance, redaction

pytestmark = pytest.mark.usefixtures("with_git")

KEY = "sk-" + "abcdefghij0123456789"
TOKEN = "ghp_" + "abcdefghij0123456789"
HEX = "0123456789abcdef0123456789abcdef01234567"


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


def hunk(*lines: str) -> tuple[str, bool, list[str]]:
    """Returns what is kept of a diff of these lines, marks included."""
    header = ["diff --git a/train.py b/train.py", "--- a/train.py", "+++ b/train.py", "@@ -1,3 +1,3 @@"]
    return provenance.bounded_diff(f"{line}\n".encode() for line in [*header, *lines])


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


def test_commit_and_dirt_are_told_without_a_diff(tree: Path, tmp_path_factory) -> None:
    assert provenance.git_commit(tmp_path_factory.mktemp("outside")) is None
    git(tree, "tag", "v1-dirty")
    commit = git(tree, "rev-parse", "HEAD")
    (tree / "new file.py").write_text("x\n")
    assert provenance.git_commit(tree / "sub") == {"commit": commit, "dirty": False}
    (tree / "train.py").write_text("lr = 2\n")
    assert provenance.git_commit(tree) == {"commit": commit, "dirty": True}


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
    assert not redaction.looks_secret(name)


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
        # Python: annotated, called, indexed, in brackets, in other quotes
        'password: str = "hunter2secret"',
        'api_key: str = "abcdefghijkl"',
        'api_key: Optional[str] = field(default="abcdef")',
        'HF_TOKEN: str = flag("abcdefghij")',
        'os.environ["API_KEY"] = "abcdef"',
        f'os.environ.setdefault("WANDB_API_KEY", "{HEX}")',
        'parser.add_argument("--password", default="hunter2")',
        'parser.add_argument("--hub-token", type=str, default="hunter2")',
        f'wandb.login(key="{HEX}")',
        'wandb.login("hunter2", relogin=True)',
        'PASSWORD = ("hunter2secret")',
        'PASSWORD = """hunter2secret',
        "password = b'hunter2'",
        'password = "it\'s hunter2"',
        'PASSWORD = r"a\\"b hunter2"',
        'connect(user="me", passwd="hunter2")',
        'requests.get(url, auth=("me", "hunter2"))',
        'headers = {"Authorization": f"Basic {name}:hunter2"}',
        'if password == "hunter2":',
        'check("hunter2")  # the password',
        'tokenizer, token = load("gpt2"), "hunter2"',
        'self.max_tokens, self.token = 5, "hunter2"',
        'secret = base64.b64decode("aHVudGVyMg==")',
        'SLACK_WEBHOOK = "https://example.org/T00/B00"',
        # YAML, JSON, TOML, shell, Docker, netrc, XML, ini
        "  api_key: abcdefghij",
        "password: correct horse battery",
        "  token: abcdefghij",
        "hub_token: 12345678901",
        '"apiKey": "abcdef",',
        '{"user": "me", "dbPassword" : "hunter2"}',
        'client_secret = "abcdefgh"',
        "DB_PASS=hunter2",
        "smtpPass: 'hunter2'",
        "export HF_TOKEN=abcdefgh",
        "export WANDB_API_KEY=" + HEX,
        "ENV WANDB_API_KEY abcdefgh",
        "train --api-key abcdefgh --steps 5",
        "train --password=hunter2",
        "machine api.wandb.ai login user password hunter2",
        "<password>hunter2</password>",
        "db_pw = hunter2",
        "curl -u user:hunter2 https://example.org",
        "wandb login hunter2hunter2",
        "HF_TOKEN=abc.def.ghi python train.py",
        "WANDB_KEY = 'hunter'",
        "init(key='hunter2hunter2')",
        # by its form alone
        *(f'x = "{HEX[:size]}"' for size in (32, 40)),
        f'x = "{HEX}{HEX[:24]}"',
        f"x = '{HEX.upper()}'",
        f"WANDB={HEX}",
        "x = 'abcdefghijklmnopqrstuvwxyz0123456'",
        "x = 'Zm9vYmFyMTIzNDU2Nzg5MEFCQ0RFRkdI+/=='",
        "redis = 'redis://:hunter2@localhost:6379/0'",
        "git+https://me:hunter2@example.org/x.git",
        "https://abcdefghijkl0123@example.org/x.git",
        "https://example.org/x?sv=1&sig=abcdefgh",
    ],
)
def test_lines_that_look_like_secrets_are_left_out(line: str) -> None:
    for mark in "+- ":
        diff, complete, _ = hunk(" lr = 1", mark + line, "+steps = 3")
        assert diff == hunk(" lr = 1", mark + provenance.LEFT_OUT_LINE, "+steps = 3")[0]
        assert not complete


@pytest.mark.parametrize(
    "line",
    [
        "max_tokens = 100000",
        "total_tokens: int = 100000",
        "num_tokens=batch['input_tokens']",
        'parser.add_argument("--max-tokens", type=int, default=100_000, help="how many")',
        'tokenizer = "gpt2"',
        'tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")',
        'author = "somebody else"',
        'bypass = "nothing here"',
        'keys = ["observations", "actions"]',
        'env = gymnasium.make("HalfCheetah-v5")',
        "url = 'https://example.org:8080/x?page=3'",
        "import secrets",
        "def forward(self, observations: Tensor, actions: Tensor) -> dict[str, Tensor]:",
        "path = 'checkpoints/half_cheetah/medium_expert/latest'",
        f"numpy==2.4.0 --hash=sha256:{HEX}{HEX[:24]}",
        "tokens = tokenizer(text)",
        "key = jax.random.key(0)",
        "for key, value in state.items():",
        "self.num_tokens = batch_tokens.sum()",
        "a_very_long_name_of_a_function_with_many_words_in_it(x)",
        "return self.compute_generalized_advantage_estimation_returns()",
    ],
)
def test_ordinary_lines_stay(line: str) -> None:
    diff, complete, _ = hunk("+" + line)
    assert diff.endswith(f"\n+{line}\n")
    assert complete


def test_a_private_key_is_left_out_whole(tree: Path) -> None:
    lines = ["-----BEGIN RSA PRIVATE KEY-----", "abcdefgh", "ijklmnop", "-----END RSA PRIVATE KEY-----"]
    (tree / "train.py").write_text("\n".join(["a = 1", *lines, "b = 2"]) + "\n")
    state = provenance.git_state(tree)
    assert state is not None
    assert not any(line in state["diff"] for line in lines)
    assert state["diff"].endswith(f"+a = 1\n{f'+{provenance.LEFT_OUT_LINE}{chr(10)}' * 4}+b = 2\n")


@pytest.mark.parametrize(
    "lines",
    [
        ["PASSWORD = (", '    "hunter2secret"', ")"],
        ["password: str = \\", "    'hunter2secret'"],
        ["parser.add_argument(", '    "--password",', '    type=str, default="hunter2secret",', ")"],
        ["parser.add_argument(", '    "--hub-token",', "    type=str,", '    default="hunter2secret",', ")"],
        ["wandb.login(", '    key="hunter2secret",', ")"],
        ["password: |", "  hunter2secret"],
        ["password: >-", "  hunter2secret"],
        ["- name: WANDB_API_KEY", "  value: hunter2secret"],
        ['{"name": "WANDB_API_KEY",', ' "value": "hunter2secret"}'],
        ["api_keys:", "  - hunter2secret"],
    ],
)
def test_a_secret_on_a_line_after_its_name_is_left_out(lines: list[str]) -> None:
    # the name is known from the commit, or as new as its value
    for mark in " +":
        marked = [("+" if "hunter2secret" in line else mark) + line for line in lines]
        diff, complete, _ = hunk(" lr = 1", *marked, "+after = 3")
        assert "hunter2secret" not in diff
        assert diff.endswith("+after = 3\n")
        assert not complete


def test_the_place_of_a_hunk_holds_no_secret(tree: Path) -> None:
    lines = ["PASSWORD = dict(a='hunter2secret',", *(f"  x{number}={number}," for number in range(20)), ")"]
    (tree / "train.py").write_text("\n".join(lines))
    git(tree, "commit", "-qam", "second")
    (tree / "train.py").write_text("\n".join(lines).replace("x15=15", "x15=0"))
    state = provenance.git_state(tree)
    assert state is not None
    assert "+  x15=0" in state["diff"]
    assert "hunter2secret" not in state["diff"]


def test_long_lines_are_judged_in_time() -> None:
    words = ["token", "password ", "-", "--key", "'", '"a', "://:", "aA0", "\\", "= "]
    for word in words:
        for other in words:
            hunk("+" + ((word + other) * 2000)[:4000])


@pytest.fixture
def failing_git(tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git that fails at the command named in a file, hung up or with an error."""
    folder = tmp_path_factory.mktemp("bin")
    real = shutil.which("git")
    script = f"""#!/bin/sh
for word in "$@"; do
    if [ "$word" = "$(cat {folder}/command)" ]; then . {folder}/failure; fi
done
exec {real} "$@"
"""
    (folder / "git").write_text(script)
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize("failure", ["exit 128", "exec sleep 60"])
@pytest.mark.parametrize(("command", "unknown"), [("diff", "dirty"), ("ls-files", "untracked")])
def test_what_git_does_not_say_is_unknown(
    tree: Path, failing_git: Path, monkeypatch, failure, command, unknown
) -> None:
    monkeypatch.setattr(provenance, "GIT_TIMEOUT", 0.5)
    (failing_git / "failure").write_text(failure)
    (failing_git / "command").write_text(command)
    state = provenance.git_state(tree)
    assert state is not None
    assert state[unknown] is None
    assert state["diff_complete"] == (command != "diff")
    (failing_git / "command").write_text("nothing")
    state = provenance.git_state(tree)
    assert state is not None
    assert state[unknown] is not None


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
