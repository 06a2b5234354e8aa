"""The command as a whole: streams, last lines, exit codes, signals, start-up."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgecc as package
from edgecc.cli import main as main_function
from edgecc.cli.main import COMMANDS, cli
from edgecc.errors import (
    BackendError,
    HubError,
    InputError,
    InternalError,
    MismatchError,
    ResourceError,
    UnsupportedError,
    UsageError,
)
from helpers.command_line import Command, arguments_of, environment, process


class TestHelp:
    @pytest.mark.parametrize("flag", ["-h", "--help"])
    def test_of_the_whole(self, edgecc: Command, flag: str) -> None:
        result = edgecc(flag)
        assert (result.code, result.err) == (0, "")
        for name in COMMANDS:
            assert f"  {name} " in result.out

    @pytest.mark.parametrize("name", COMMANDS)
    def test_of_each_command(self, edgecc: Command, name: str) -> None:
        command = importlib.import_module(COMMANDS[name]).command
        below = [[name, each] for each in getattr(command, "commands", ())]
        for words in ([name], *below):
            result = edgecc(*words, "--help")
            assert (result.code, result.err) == (0, "")
            assert result.out.startswith(f"Usage: edgecc {' '.join(words)}")
            assert ("--debug" in result.out) is (words in below or not below)

    def test_summaries_are_the_commands_own(self, edgecc: Command) -> None:
        """The list is written down, so that showing it imports no command."""
        text = edgecc("--help").out
        with cli.make_context("edgecc", [], resilient_parsing=True) as context:
            assert cli.list_commands(context) == list(COMMANDS)
            assert cli.get_command(context, "nonsense") is None
        assert text.index("Commands:") > 0

    def test_version(self, edgecc: Command) -> None:
        result = edgecc("--version")
        assert (result.code, result.out) == (0, f"edgecc {package.__version__}\n")

    def test_starts_without_the_compiler(self) -> None:
        program = (
            "import sys\n"
            "from edgecc.cli import main\n"
            "for command in sys.argv[1:]:\n"
            "    assert main([*filter(None, [command]), '--help']) == 0\n"
            "heavy = {'numpy', 'onnx', 'onnxruntime', 'onnxscript', 'networkx', 'tokenizers',\n"
            "         'jinja2', 'safetensors', 'torch', 'jsonschema', 'rich', 'edgecc.ir'}\n"
            "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, "", *COMMANDS],
            capture_output=True,
            env=environment(),
            check=True,
        )
        assert done.stderr.decode().strip() == "[]"


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "no command given"),
            (["frobnicate"], "No such command 'frobnicate'"),
            (["complie"], "Did you mean 'compile'?"),
            (["--nonsense"], "No such option"),
            (["run"], "Missing argument"),
            (["run", "x", "y"], "unexpected extra argument"),
            (["verify", "x", "--prompts", "many"], "not a valid integer"),
            (["inspect", "x", "--weigths"], "--weights"),
        ],
    )
    def test_wrong_arguments(self, edgecc: Command, arguments: list[str], words: str) -> None:
        result = edgecc(*arguments)
        assert result.code == 2
        assert result.out == ""
        assert result.last.startswith("edgecc: error[usage]: ")
        assert words in result.err

    def test_no_command_shows_the_commands(self, edgecc: Command) -> None:
        assert all(name in edgecc().err for name in COMMANDS)

    def test_wrong_arguments_point_to_the_help(self, edgecc: Command) -> None:
        assert "Try 'edgecc run --help' for help." in edgecc("run").err


class TestErrors:
    """Exceptions to exit codes, whatever raises them."""

    @pytest.fixture
    def raising(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, edgecc: Command
    ) -> Callable[..., Any]:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

        def run(error: BaseException, *flags: str) -> Any:
            def fail(path: object, **options: object) -> None:
                raise error

            monkeypatch.setattr("edgecc.inspection.inspect_path", fail)
            return edgecc("inspect", "x", *flags)

        return run

    @pytest.mark.parametrize(
        ("kind", "code"),
        [
            (InternalError, 1),
            (BackendError, 1),
            (UsageError, 2),
            (InputError, 3),
            (UnsupportedError, 4),
            (MismatchError, 5),
            (ResourceError, 6),
            (HubError, 7),
        ],
    )
    def test_our_own(self, raising: Callable[..., Any], kind: Any, code: int) -> None:
        error = kind("area/what", "it broke", where="file: key", notes=["a fact"], help="mend it")
        result = raising(error)
        assert result.code == code
        assert result.out == ""
        assert result.err == (
            "error[area/what]: it broke\n"
            "  --> file: key\n"
            "  note: a fact\n"
            "  help: mend it\n"
            "edgecc: error[area/what]: it broke\n"
        )

    @pytest.mark.parametrize(
        ("error", "code", "last"),
        [
            (MemoryError(), 6, "edgecc: error[resources/memory]: not enough memory"),
            (
                OSError(28, "No space left on device", "/x/y"),
                6,
                "edgecc: error[resources/io]: No space left on device ENOSPC (/x/y)",
            ),
            (
                PermissionError(13, "Permission denied"),
                6,
                "edgecc: error[resources/io]: Permission denied EACCES",
            ),
            (KeyboardInterrupt(), 130, "edgecc: error[interrupted]: stopped by the user"),
            (SystemExit(143), 143, "edgecc: error[terminated]: stopped by a signal"),
            (SystemExit(129), 129, "edgecc: error[terminated]: stopped by a signal"),
        ],
    )
    def test_of_python(
        self, raising: Callable[..., Any], error: BaseException, code: int, last: str
    ) -> None:
        result = raising(error)
        assert (result.code, result.last) == (code, last)
        assert "Traceback" not in result.err

    def test_a_bug_leaves_a_report(self, raising: Callable[..., Any], tmp_path: Path) -> None:
        result = raising(ZeroDivisionError("oops"))
        assert result.code == 1
        assert result.last == "edgecc: error[internal]: ZeroDivisionError('oops')"
        assert "Traceback" not in result.err
        (report,) = tmp_path.glob("edgecc-report-*.txt")
        assert str(report) in result.err
        text = report.read_text()
        assert "ZeroDivisionError: oops" in text
        assert package.__version__ in text

    @pytest.mark.parametrize(
        "error", [InputError("a/b", "c"), ZeroDivisionError("c"), OSError(5, "c")], ids=repr
    )
    def test_debug_shows_the_traceback(
        self, raising: Callable[..., Any], error: BaseException
    ) -> None:
        result = raising(error, "--debug")
        assert "Traceback (most recent call last)" in result.err
        assert result.last.startswith("edgecc: error[")

    def test_several_findings_are_all_shown(self, raising: Callable[..., Any]) -> None:
        findings = [InputError("a/b", f"message {i}").diagnostics[0] for i in range(3)]
        result = raising(InputError(*findings))
        assert [f"error[a/b]: message {i}" in result.err for i in range(3)] == [True] * 3
        assert result.last == "edgecc: error[a/b]: message 0"

    def test_notes_added_on_the_way_are_shown(self, raising: Callable[..., Any]) -> None:
        error = InputError("a/b", "message")
        error.add_note("in pass fuse-qkv")
        assert "  in pass fuse-qkv\n" in raising(error).err

    @pytest.mark.parametrize(
        ("message", "last"),
        [("first\nsecond", "first"), ("", ""), ("\n\n  x", "  x"), ("\n", "")],
    )
    def test_the_last_line_is_one_line(
        self, raising: Callable[..., Any], message: str, last: str
    ) -> None:
        assert raising(InputError("a/b", message)).err.splitlines()[-1] == (
            f"edgecc: error[a/b]: {last}"
        )


class TestColor:
    @pytest.mark.parametrize(
        ("flags", "colored"),
        [([], False), (["--color=always"], True), (["--color=never"], False)],
    )
    def test_flag(self, edgecc: Command, flags: list[str], colored: bool) -> None:
        assert ("\x1b[" in edgecc("inspect", "/nonexistent", *flags).err) is colored

    @pytest.mark.parametrize(("value", "colored"), [("1", False), ("", True)])
    def test_no_color_decides_on_a_terminal(
        self, edgecc: Command, monkeypatch: pytest.MonkeyPatch, value: str, colored: bool
    ) -> None:
        monkeypatch.setattr("edgecc.cli.output.is_terminal", lambda: True)
        monkeypatch.setenv("NO_COLOR", value)
        assert ("\x1b[" in edgecc("inspect", "/nonexistent").err) is colored
        assert "\x1b[" in edgecc("inspect", "/nonexistent", "--color=always").err


class TestVariables:
    @pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", " 2", "²", "٢", "9999999", "1e3"])
    @pytest.mark.parametrize("command", [["run", "--prompt", "a"], ["verify"]])
    def test_bad_thread_counts(
        self,
        edgecc: Command,
        bundle: Path,
        monkeypatch: pytest.MonkeyPatch,
        command: list[str],
        value: str,
    ) -> None:
        monkeypatch.setenv("EDGECC_NUM_THREADS", value)
        result = edgecc(command[0], bundle, *command[1:])
        assert result.code == 2
        assert result.id == "usage/num-threads"
        assert value in result.last

    @pytest.mark.parametrize("value", ["", "1", "2"])
    def test_thread_counts(
        self, edgecc: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch, value: str
    ) -> None:
        monkeypatch.setenv("EDGECC_NUM_THREADS", value)
        assert edgecc("run", bundle, "--prompt", "a", "--max-new-tokens", 1).code == 0

    def test_the_flag_wins(
        self, edgecc: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EDGECC_NUM_THREADS", "nonsense")
        arguments = ("run", bundle, "--prompt", "a", "--max-new-tokens", 1)
        assert edgecc(*arguments, "--num-threads", 1).code == 0

    @pytest.mark.parametrize("count", ["0", "-1", "1025", "100000", str(10**12), "x"])
    def test_bad_thread_flags(self, edgecc: Command, bundle: Path, count: str) -> None:
        result = edgecc("run", bundle, "--prompt", "a", "--num-threads", count)
        assert result.code == 2
        assert count in result.err

    @pytest.mark.parametrize(
        ("value", "lines"),
        [("", True), ("info", True), ("DEBUG", True), ("warning", True), ("error", False)],
    )
    def test_log_levels(
        self,
        edgecc: Command,
        target: Path,
        monkeypatch: pytest.MonkeyPatch,
        value: str,
        lines: bool,
    ) -> None:
        monkeypatch.setenv("EDGECC_LOG", value)
        result = edgecc("inspect", target)
        assert result.code == 0
        assert result.last.startswith("edgecc: ok ") is lines

    def test_no_log_level(
        self, edgecc: Command, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EDGECC_LOG", "loud")
        result = edgecc("inspect", target)
        assert (result.code, result.id) == (2, "usage/log-level")
        assert "debug" in result.err


def test_main_leaves_the_process_as_it_was(edgecc: Command, target: Path) -> None:
    import warnings

    before = signal.getsignal(signal.SIGTERM), list(warnings.filters), sys.stdout
    edgecc("inspect", target)
    assert (signal.getsignal(signal.SIGTERM), list(warnings.filters), sys.stdout) == before


def test_arguments_default_to_the_process_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["edgecc", "--version"])
    assert main_function() == 0
    assert capsys.readouterr().out.startswith("edgecc ")


def test_another_working_directory(
    edgecc: Command, tmp_path: Path, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths, and a bundle that is moved away afterwards."""
    os.symlink(target, tmp_path / "t")
    os.symlink(draft, tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    made = edgecc("compile", "t", "--draft", "./d", "-o", "x/b", "--max-model-len", 20)
    assert made.code == 0, made.err
    (tmp_path / "x" / "b").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "x")
    ran = edgecc("run", "../moved", "--prompt", "a", "--json")
    assert ran.code == 0, ran.err
    assert len(json.loads(ran.out)["token_ids"]) > 0


class TestProcess:
    """What only a real process can show."""

    def test_module(self) -> None:
        result = process("--version")
        assert (result.code, result.out) == (0, f"edgecc {package.__version__}\n")

    def test_exit_code_and_streams(self, tmp_path: Path) -> None:
        result = process("inspect", tmp_path / "nothing")
        assert result.code == 3
        assert result.out == ""
        assert result.last.startswith("edgecc: error[inspect/no-such-path]")

    @pytest.mark.parametrize("arguments", [["compile", "--help"], ["run", "--prompt", "a"]])
    def test_a_reader_that_leaves(self, bundle: Path, arguments: list[str]) -> None:
        """`edgecc ... | head`: no traceback, no error, not a word."""
        if arguments[0] == "run":
            arguments = ["run", str(bundle), *arguments[1:]]
        read, write = os.pipe()
        os.close(read)
        started = subprocess.Popen(
            arguments_of(*arguments), stdout=write, stderr=subprocess.PIPE, env=environment()
        )
        os.close(write)
        _, err = started.communicate()
        assert started.returncode == 0, err.decode()
        assert set(err.decode().splitlines()) <= {"edgecc: load"}

    def test_a_reader_of_messages_that_leaves(self, tmp_path: Path, target: Path) -> None:
        """`edgecc ... 2>&1 | head -1`: the bundle is made all the same."""
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            arguments_of("compile", target, "-o", tmp_path / "b"),
            stderr=write,
            env=environment(),
        )
        os.close(write)
        assert done.returncode == 0
        assert (tmp_path / "b" / "bundle.json").exists()

    def test_no_standard_streams(self, bundle: Path) -> None:
        """Standard output and error may be closed (`>&-`)."""
        command = arguments_of("run", bundle, "--prompt", "a", "--max-new-tokens", "2")
        quoted = " ".join(f"'{part}'" for part in command)
        for redirection in ("2>&-", ">&- 2>&-"):
            done = subprocess.run(
                ["sh", "-c", f"{quoted} {redirection}"], capture_output=True, env=environment()
            )
            assert done.returncode == 0, (redirection, done.stderr)
            assert bool(done.stdout) is (redirection == "2>&-")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_under_the_output(self, target: Path) -> None:
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                arguments_of("inspect", target),
                stdout=full,
                stderr=subprocess.PIPE,
                env=environment(),
            )
        assert done.returncode == 6
        last = done.stderr.decode().splitlines()[-1]
        assert last.startswith("edgecc: error[resources/io]: No space left")

    @pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo terminals")
    def test_results_and_bar_do_not_mix_on_a_terminal(self, bundle: Path) -> None:
        """The progress bar goes to the terminal, results to where they are redirected."""
        import pty

        terminal, other_end = pty.openpty()
        started = subprocess.Popen(
            arguments_of("verify", bundle, "--prompts", "1", "--json"),
            stdout=subprocess.PIPE,
            stderr=other_end,
            env=environment(TERM="xterm"),
        )
        os.close(other_end)
        err = b""
        while True:
            try:
                err += os.read(terminal, 4096)
            except OSError:  # the process ended
                break
        os.close(terminal)
        assert started.stdout is not None
        out = started.stdout.read()
        started.stdout.close()
        assert started.wait() == 0
        assert json.loads(out)["passed"] is True
        assert b"\x1b[" in err  # the bar
        assert err.rstrip().splitlines()[-1].startswith(b"edgecc: ok ")

    @pytest.mark.parametrize("swallowed", [False, True])
    @pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
    def test_signals(
        self, tmp_path: Path, target: Path, name: str, code: int, swallowed: bool
    ) -> None:
        """Stopped while it writes: the last line says so, and nothing is left.

        Also where a library turns what the signal raised into an error of its own.
        """
        program = (
            "import os, signal, sys\n"
            "import edgecc.device_artifact\n"
            "from edgecc.cli import main\n"
            "def golden_rows(*args):\n"
            "    try:\n"
            f"        os.kill(os.getpid(), signal.{name})\n"
            "    except BaseException as error:\n"
            f"        raise {'ValueError' if swallowed else 'error'} from None\n"
            "edgecc.device_artifact.golden_rows = golden_rows\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, "compile", str(target), "-o", str(tmp_path / "b")],
            capture_output=True,
            env=environment(),
        )
        assert done.returncode == code, done.stderr.decode()
        assert (
            done.stderr.decode()
            .splitlines()[-1]
            .endswith(
                "terminated]: stopped by a signal" if code == 143 else "]: stopped by the user"
            )
        )
        assert list(tmp_path.iterdir()) == []

    def test_interrupted_while_it_starts(self, tmp_path: Path) -> None:
        (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
        env = environment()
        env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
        done = subprocess.run(arguments_of("--version"), capture_output=True, env=env, text=True)
        assert (done.returncode, done.stdout) == (130, "")
        assert done.stderr == "edgecc: error[interrupted]: stopped by the user\n"


def test_messages_name_commands_that_exist() -> None:
    """ "Run `edgecc X`" must be something a user can do."""
    source = Path(package.__file__).parent
    named = {
        (path.name, command)
        for folder in ("cli", "passes", "frontends", "backends", ".")
        for path in (source / folder).rglob("*.py")
        for command in re.findall(r"`edgecc ([a-z-]+)", path.read_text(encoding="utf-8"))
    }
    assert len({command for _, command in named}) > 3
    assert {(file, command) for file, command in named if command not in COMMANDS} == set()


@pytest.mark.parametrize(
    ("option", "metavar"), [("--device", "NAME"), ("--host", "ADDRESS"), ("--dtype", "NAME")]
)
def test_help_names_what_a_flag_takes_by_one_word(
    edgecc: Command, option: str, metavar: str
) -> None:
    lines = [
        line.split()
        for name in COMMANDS
        if name != "cache"
        for line in edgecc(name, "--help").out.splitlines()
        if line.split()[:1] == [option]
    ]
    assert lines
    assert {words[1] for words in lines} == {metavar}
