"""`edgecc run`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgecc as package
from edgecc.backends.runtime import Chunk, Generator
from edgecc.errors import RequestError
from helpers.checkpoints import write_draft, write_target
from helpers.command_line import SMALL, TAPS, Command
from helpers.dspark_heads import write_heads

PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def target_bundle(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """The target alone."""
    out = tmp_path_factory.mktemp("run") / "bundle"
    package.compile(target, out=out, max_model_len=64)
    return out


@pytest.fixture(scope="module")
def wordless_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a tokenizer, with stop tokens."""
    folder = tmp_path_factory.mktemp("run")
    target = write_target(folder / "t", **SMALL, tokenizer=False)
    draft = write_draft(folder / "d", **SMALL, **TAPS)
    package.compile(target, draft, out=folder / "bundle", max_model_len=64)
    return folder / "bundle"


def answer(edgecc: Command, bundle: Path, *flags: object) -> dict[str, Any]:
    result = edgecc("run", bundle, "--json", *flags)
    assert result.code == 0, result.err
    assert result.out.count("\n") == 1
    found: dict[str, Any] = json.loads(result.out)
    return found


class TestSeveral:
    PROMPTS = ("def f(x):", "a", "class A:")

    def flags(self) -> list[str]:
        return [flag for prompt in self.PROMPTS for flag in ("--prompt", prompt)]

    def test_text_in_order(self, edgecc: Command, bundle: Path) -> None:
        result = edgecc("run", bundle, *self.flags(), "--max-new-tokens", 8)
        with package.load(bundle) as generator:
            expected = [generator.generate(p, max_new_tokens=8) for p in self.PROMPTS]
        texts = [f"==> prompt {n} <==\n{a.text}\n" for n, a in enumerate(expected, 1)]
        assert result.out == "\n".join(texts)
        count = sum(len(answer.token_ids) for answer in expected)
        reasons = ", ".join(dict.fromkeys(str(answer.finish_reason) for answer in expected))
        assert result.last == f"edgecc: ok {count} tokens in 3 answers, finished by {reasons}"

    def test_json(self, edgecc: Command, bundle: Path) -> None:
        found = answer(edgecc, bundle, *self.flags(), "--max-new-tokens", 6)["answers"]
        single = [
            answer(edgecc, bundle, "--prompt", prompt, "--max-new-tokens", 6)
            for prompt in self.PROMPTS
        ]
        for several, alone in zip(found, single, strict=True):
            assert several.keys() == alone.keys()
            for key in ("token_ids", "text", "finish_reason", "accepted", "proposed"):
                assert several[key] == alone[key]

    def test_statistics_of_each(self, edgecc: Command, bundle: Path) -> None:
        result = edgecc("run", bundle, *self.flags(), "--max-new-tokens", 4, "--stats")
        assert sum(line.startswith("answer ") for line in result.err.splitlines()) == 3

    def test_one_of_them_is_refused(self, edgecc: Command, bundle: Path) -> None:
        result = edgecc("run", bundle, "--prompt", "a", "--prompt", "x" * 64, "--prompt", "b")
        assert (result.code, result.id, result.out) == (2, "request/prompt-too-long", "")
        assert "note: this is prompt 2 of 3" in result.err

    def test_images_go_with_one(self, edgecc: Command, bundle: Path) -> None:
        result = edgecc("run", bundle, *self.flags(), "--image", "cat.png")
        assert result.code == 2
        assert "usage/prompt" in result.err


class TestText:
    def test_an_error_after_some_text_begins_a_line(
        self, edgecc: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = Generator.stream

        def failing(*args: Any, **kwargs: Any) -> Iterator[Chunk]:
            for chunk in stream(*args, **kwargs):
                yield replace(chunk, text="some text")
                raise RequestError("grammar/too-complex", "it broke")

        monkeypatch.setattr(Generator, "stream", failing)
        result = edgecc("run", bundle, "--prompt", PROMPT, "--ignore-eos")
        assert result.code == 2
        assert result.out == "some text\n"

    def test_streams_to_standard_output(self, edgecc: Command, bundle: Path) -> None:
        result = edgecc("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 8)
        assert result.code == 0
        with package.load(bundle) as generator:
            expected = generator.generate(PROMPT, max_new_tokens=8)
        assert result.out == expected.text + "\n"
        assert result.last == f"edgecc: ok {len(expected.token_ids)} tokens, finished by length"

    def test_each_piece_at_once(
        self, edgecc: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pieces: list[str] = []
        monkeypatch.setattr("edgecc.cli.run_command.print_text", pieces.append)
        edgecc("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 8, "--no-speculation")
        assert len(pieces) == 9  # one per token, and the end of the line
        assert pieces[-1] == "\n"

    def test_nothing_but_text(self, edgecc: Command, bundle: Path) -> None:
        quiet = edgecc("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 8, "-q")
        loud = edgecc("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 8, "-vv")
        assert quiet.out == loud.out
        assert quiet.err == ""

    def test_no_tokens(self, edgecc: Command, bundle: Path) -> None:
        result = edgecc("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 0)
        assert (result.code, result.out) == (0, "\n")
        assert result.last == "edgecc: ok 0 tokens, finished by length"

    def test_stats(self, edgecc: Command, bundle: Path) -> None:
        result = edgecc("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 8, "--stats")
        for word in (
            "prompt ",
            "answer ",
            "speed ",
            "steps ",
            "accepted ",
            "by position ",
            "time ",
        ):
            assert f"\n{word}" in result.err
        assert "speed" not in result.out
        assert result.last.startswith("edgecc: ok ")

    def test_stats_when_quiet(self, edgecc: Command, bundle: Path) -> None:
        """Asked for by a flag, so shown."""
        result = edgecc("run", bundle, "--prompt", PROMPT, "--stats", "-q")
        assert "speed " in result.err
        assert "edgecc: ok" not in result.err


class TestJson:
    def test_shape(self, edgecc: Command, bundle: Path) -> None:
        found = answer(edgecc, bundle, "--prompt", PROMPT, "--max-new-tokens", 12, "--ignore-eos")
        assert set(found) == {
            "token_ids",
            "text",
            "finish_reason",
            "seed",
            "accepted",
            "proposed",
            "compiled_speculative_tokens",
            "stats",
        }
        assert len(found["token_ids"]) == 12
        assert found["compiled_speculative_tokens"] == 4
        assert len(found["accepted"]) == len(found["proposed"])
        assert all(
            0 <= a <= p <= 4 for a, p in zip(found["accepted"], found["proposed"], strict=True)
        )
        # The prompt gives the first token; each round its accepted ones and one of its own.
        assert 12 <= 1 + sum(found["accepted"]) + len(found["accepted"]) <= 12 + 4
        assert found["finish_reason"] == "length"
        stats = found["stats"]
        assert stats["new_tokens"] == 12
        assert stats["prompt_tokens"] == len(PROMPT)
        assert stats["rounds"] == len(found["accepted"])
        assert stats["accepted_tokens"] == sum(found["accepted"])
        assert stats["proposed_tokens"] == sum(found["proposed"])

    def test_the_same_as_text(self, edgecc: Command, bundle: Path) -> None:
        flags = ("--prompt", PROMPT, "--max-new-tokens", 20)
        text = edgecc("run", bundle, *flags).out
        assert answer(edgecc, bundle, *flags)["text"] + "\n" == text

    def test_speculation_changes_nothing(self, edgecc: Command, bundle: Path) -> None:
        flags = ("--prompt", PROMPT, "--max-new-tokens", 30, "--ignore-eos")
        plain = answer(edgecc, bundle, *flags, "--no-speculation")
        assert (sum(plain["proposed"]), sum(plain["accepted"])) == (0, 0)
        assert len(plain["accepted"]) == 29
        for steps in (1, 2, 3, 4):
            found = answer(edgecc, bundle, *flags, "-k", steps)
            assert found["token_ids"] == plain["token_ids"]
            assert found["text"] == plain["text"]
            assert max(found["proposed"]) == steps

    def test_target_alone(self, edgecc: Command, bundle: Path, target_bundle: Path) -> None:
        flags = ("--prompt", PROMPT, "--max-new-tokens", 20, "--ignore-eos")
        found = answer(edgecc, target_bundle, *flags)
        assert found["compiled_speculative_tokens"] == 0
        assert found["token_ids"] == answer(edgecc, bundle, *flags)["token_ids"]

    def test_no_tokens(self, edgecc: Command, bundle: Path) -> None:
        found = answer(edgecc, bundle, "--prompt", PROMPT, "--max-new-tokens", 0)
        assert (found["token_ids"], found["text"], found["accepted"]) == ([], "", [])
        assert found["finish_reason"] == "length"

    def test_stats_beside_it(self, edgecc: Command, bundle: Path) -> None:
        result = edgecc("run", bundle, "--prompt", PROMPT, "--json", "--stats")
        json.loads(result.out)
        assert "speed " in result.err


class TestPrompts:
    def test_token_ids(self, edgecc: Command, bundle: Path) -> None:
        ids = ",".join(str(byte) for byte in PROMPT.encode())
        flags = ("--max-new-tokens", 9)
        by_ids = answer(edgecc, bundle, "--token-ids", ids, *flags)
        assert (
            by_ids["token_ids"] == answer(edgecc, bundle, "--prompt", PROMPT, *flags)["token_ids"]
        )
        spaced = answer(edgecc, bundle, "--token-ids", ids.replace(",", " , "), *flags)
        assert spaced["token_ids"] == by_ids["token_ids"]

    def test_chat(self, edgecc: Command, bundle: Path) -> None:
        flags = ("--max-new-tokens", 9)
        found = answer(edgecc, bundle, "--chat", "hi", "--system", "be kind", *flags)
        with package.load(bundle) as generator:
            messages = [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "hi"},
            ]
            expected = generator.generate(messages=messages, max_new_tokens=9)
        assert found["token_ids"] == expected.token_ids
        assert found["stats"]["prompt_tokens"] == expected.prompt_tokens
        assert found["token_ids"] != answer(edgecc, bundle, "--prompt", "hi", *flags)["token_ids"]

    @pytest.mark.parametrize(
        ("flags", "id"),
        [
            ([], "usage/prompt"),
            (["--prompt", "a", "--chat", "b"], "usage/prompt"),
            (["--prompt", "a", "--token-ids", "1"], "usage/prompt"),
            (["--prompt", "a", "--system", "b"], "usage/prompt"),
            (["--system", "b"], "usage/prompt"),
            (["--chat", "a", "--chat", "b"], "usage/prompt"),
            (["--chat", "a", "--system", "b", "--system", "c"], "usage/prompt"),
            (["--token-ids", "1", "--token-ids", "2"], "usage/prompt"),
            (["--prompt", ""], "request/empty-prompt"),
            (["--token-ids", ""], "request/empty-prompt"),
            (["--token-ids", " "], "request/empty-prompt"),
            (["--token-ids", "1,x"], "usage/token-ids"),
            (["--token-ids", "1,,2"], "usage/token-ids"),
            (["--token-ids", "1,2,"], "usage/token-ids"),
            (["--token-ids", "1 2"], "usage/token-ids"),
            (["--token-ids", "1.0"], "usage/token-ids"),
            (["--token-ids", "1_0"], "usage/token-ids"),
            (["--token-ids", "²"], "usage/token-ids"),
            (["--token-ids", "9" * 30], "usage/token-ids"),
            (["--token-ids", "-1"], "request/token-out-of-range"),
            (["--token-ids", "259"], "request/token-out-of-range"),
            (["--token-ids", "288"], "request/token-out-of-range"),
            (["--token-ids", "9" * 18], "request/token-out-of-range"),
            (["--prompt", "x" * 64], "request/prompt-too-long"),
            (["--prompt", "a\udcffb"], "request/not-unicode"),
            (["--prompt", "a", "--max-new-tokens", "-1"], "request/bad-max-new-tokens"),
            (["--prompt", "a", "-k", "0"], "request/bad-num-speculative-tokens"),
            (["--prompt", "a", "-k", "5"], "request/bad-num-speculative-tokens"),
            (["--prompt", "a", "-k", "-2"], "request/bad-num-speculative-tokens"),
            (["--prompt", "a", "--stop", ""], "request/bad-stop"),
        ],
        ids=str,
    )
    def test_refused(self, edgecc: Command, bundle: Path, flags: list[str], id: str) -> None:
        result = edgecc("run", bundle, *flags)
        assert (result.code, result.id, result.out) == (2, id, "")

    @pytest.mark.parametrize("length", [1, 62, 63])
    def test_up_to_the_capacity(self, edgecc: Command, bundle: Path, length: int) -> None:
        flags = ("--prompt", "x" * length, "--max-new-tokens", 1000, "--ignore-eos")
        found = answer(edgecc, bundle, *flags)
        assert len(found["token_ids"]) == 64 - length
        assert found["finish_reason"] == "length"

    def test_absurd_answers_end_at_the_capacity(self, edgecc: Command, bundle: Path) -> None:
        flags = ("--prompt", "x", "--max-new-tokens", 10**30, "--ignore-eos")
        assert len(answer(edgecc, bundle, *flags)["token_ids"]) == 63

    def test_stop(self, edgecc: Command, bundle: Path) -> None:
        text = answer(edgecc, bundle, "--prompt", PROMPT, "--ignore-eos")["text"]
        stop = text[4:6]
        found = answer(
            edgecc, bundle, "--prompt", PROMPT, "--ignore-eos", "--stop", "\0none", "--stop", stop
        )
        assert found["text"] == text[: text.index(stop)]
        assert found["finish_reason"] == "stop"


class TestSampling:
    FLAGS = ("--prompt", PROMPT, "--max-new-tokens", 12, "--ignore-eos")

    def test_flags_reach_the_sampler(self, edgecc: Command, bundle: Path) -> None:
        flags = ("--temperature", 0.9, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.01)
        penalties = ("--repetition-penalty", 1.2, "--presence-penalty", 0.5)
        more = ("--frequency-penalty", 0.25, "--seed", -3, "--logit-bias", "5=-inf,7=2.5")
        bias = ("--logit-bias", "9=-1e1")
        found = answer(edgecc, bundle, *self.FLAGS, *flags, *penalties, *more, *bias)
        with package.load(bundle) as generator:
            expected = generator.generate(
                PROMPT,
                max_new_tokens=12,
                ignore_eos=True,
                temperature=0.9,
                top_k=40,
                top_p=0.95,
                min_p=0.01,
                repetition_penalty=1.2,
                presence_penalty=0.5,
                frequency_penalty=0.25,
                seed=-3,
                logit_bias={5: float("-inf"), 7: 2.5, 9: -10.0},
            )
        assert found["token_ids"] == expected.token_ids
        assert found["seed"] == -3
        assert "logprobs" not in found

    def test_the_seed_that_was_drawn_gives_the_text_again(
        self, edgecc: Command, bundle: Path
    ) -> None:
        first = answer(edgecc, bundle, *self.FLAGS, "--temperature", 2)
        assert first["seed"] is not None
        again = answer(
            edgecc, bundle, *self.FLAGS, "--temperature", 2, "--seed", first["seed"], "-k", 1
        )
        assert again["token_ids"] == first["token_ids"]
        said = edgecc("run", bundle, *self.FLAGS, "--temperature", 2, "--seed", 5, "-v").err
        assert "seed 5" in said

    def test_greedy_has_no_seed(self, edgecc: Command, bundle: Path) -> None:
        assert answer(edgecc, bundle, *self.FLAGS)["seed"] is None

    def test_log_probabilities(self, edgecc: Command, bundle: Path) -> None:
        found = answer(edgecc, bundle, *self.FLAGS, "--logprobs", 3)
        assert [item["token_id"] for item in found["logprobs"]] == found["token_ids"]
        for item in found["logprobs"]:
            assert len(item["top"]) == 3
            assert item["top"][0]["token_id"] == item["token_id"]  # decoding is greedy
            assert item["logprob"] == item["top"][0]["logprob"] < 0
        none = answer(edgecc, bundle, "--prompt", PROMPT, "--max-new-tokens", 0, "--logprobs", 1)
        assert none["logprobs"] == []

    def test_what_the_checkpoint_recommends(
        self, edgecc: Command, bundle: Path, tmp_path: Path
    ) -> None:
        copy = shutil.copytree(bundle, tmp_path / "copy")
        path = copy / "tokenizer" / "generation_config.json"
        recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 1}
        path.write_text(json.dumps(recommended))
        manifest = json.loads((copy / "bundle.json").read_text())
        manifest["files"]["tokenizer/generation_config.json"] = {
            "bytes": path.stat().st_size,
            "sha256": "0" * 64,
        }
        (copy / "bundle.json").write_text(json.dumps(manifest))
        flags = (*self.FLAGS, "--seed", 4)
        found = answer(edgecc, copy, *flags, "--sample")
        wide = answer(edgecc, copy, *flags, "--sample", "--temperature", 1.5)
        plain = answer(edgecc, copy, *flags)
        assert found == answer_of(edgecc, copy, flags, 0.6, 20, found)
        assert wide["token_ids"] != found["token_ids"] != plain["token_ids"]
        size = path.stat().st_size
        path.write_text(json.dumps({"temperature": "hot"}).ljust(size))
        result = edgecc("run", copy, *flags, "--sample")
        assert (result.code, "temperature must be a number" in result.err) == (2, True)
        path.write_text("[".ljust(size))
        assert edgecc("run", copy, *flags).code == 3

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--temperature", -1), "temperature must be a number, 0 or more, not -1.0"),
            (("--top-p", 0.9), "decoding is greedy without a temperature"),
            (("--logit-bias", "5"), "'5', which is no token id with a number"),
            (("--logit-bias", "5=x"), "'5=x', which is no token id"),
            (("--logit-bias", "5=nan"), "'5=nan', which is no token id"),
            (("--logit-bias", "5=1,5=2"), "names token 5 twice"),
            (("--logit-bias", "-5=1"), "-5 in logit_bias is no token id"),
            (("--logit-bias", "99999=1"), "names token 99999"),
            (("--seed", 2**64), "seed must be a whole number of 64 bits"),
            (("--logprobs", 2), "--logprobs goes with --json"),
        ],
    )
    def test_flags_that_are_refused(
        self, edgecc: Command, bundle: Path, flags: tuple[object, ...], message: str
    ) -> None:
        result = edgecc("run", bundle, "--prompt", PROMPT, *flags)
        assert result.code == 2
        assert message in result.err
        assert result.out == ""

    def test_adaptive_speculation(self, edgecc: Command, bundle: Path) -> None:
        flags = ("--prompt", PROMPT, "--max-new-tokens", 24, "--ignore-eos")
        found = answer(edgecc, bundle, *flags, "--adaptive-speculation")
        assert found["token_ids"] == answer(edgecc, bundle, *flags)["token_ids"]
        assert found["proposed"][:4] == [4, 4, 2, 1][: len(found["proposed"])]


def test_a_confidence_threshold(edgecc: Command, tmp_path: Path) -> None:
    """Random heads: half of all slots are below one half."""
    target, draft = write_heads(tmp_path, kind="vanilla", reduced=False)
    out = tmp_path / "b"
    report = edgecc("compile", target, "--draft", draft, "-o", out, "--max-model-len", 64, "-q")
    assert report.code == 0
    flags = ("--token-ids", "7,3,11,2", "--max-new-tokens", 40, "--ignore-eos")
    everything = answer(edgecc, out, *flags)
    assert everything["stats"]["withheld_tokens"] == 0
    found = answer(edgecc, out, *flags, "--confidence-threshold", 0.5)
    assert found["token_ids"] == everything["token_ids"]
    stats = found["stats"]
    assert stats["withheld_tokens"] > 0
    assert 0 < stats["proposed_tokens"] < everything["stats"]["proposed_tokens"]
    told = edgecc("run", out, *flags, "--stats", "--confidence-threshold", 0.5).err
    assert f"withheld    {stats['withheld_tokens']} proposals of low confidence" in told
    for value in ("1.5", "nan"):
        refused = edgecc("run", out, *flags, "--confidence-threshold", value)
        assert (refused.code, refused.id) == (2, "request/bad-confidence-threshold")


def answer_of(
    edgecc: Command,
    bundle: Path,
    flags: tuple[object, ...],
    temperature: float,
    top_k: int,
    found: dict[str, Any],
) -> dict[str, Any]:
    """The answer with explicit settings, with the times of the one it is compared to."""
    made = answer(edgecc, bundle, *flags, "--temperature", temperature, "--top-k", top_k)
    return {**made, "stats": found["stats"]}


class TestWithoutTokenizer:
    def test_ids(self, edgecc: Command, wordless_bundle: Path) -> None:
        found = answer(
            edgecc, wordless_bundle, "--token-ids", "5,6", "--max-new-tokens", 5, "--ignore-eos"
        )
        assert len(found["token_ids"]) == 5
        assert found["text"] == ""

    @pytest.mark.parametrize("flags", [["--prompt", "a"], ["--chat", "a"]])
    def test_text(self, edgecc: Command, wordless_bundle: Path, flags: list[str]) -> None:
        result = edgecc("run", wordless_bundle, *flags)
        assert result.code == 2
        assert result.id in ("request/no-tokenizer", "chat/no-template")


class TestBundles:
    @pytest.mark.parametrize("device", ["gpu", "", "onnx"])
    def test_other_devices(self, edgecc: Command, bundle: Path, device: str) -> None:
        result = edgecc("run", bundle, "--prompt", "a", "--device", device)
        assert (result.code, result.id) == (3, "bundle/no-artifact")
        assert "cpu" in result.err

    def test_no_such_bundle(self, edgecc: Command, tmp_path: Path) -> None:
        result = edgecc("run", tmp_path / "x", "--prompt", "a")
        assert (result.code, result.id) == (3, "bundle/not-a-bundle")

    @pytest.mark.parametrize("path", ["", "a\0b"])
    def test_no_path(self, edgecc: Command, path: str) -> None:
        result = edgecc("run", path, "--prompt", "a")
        assert (result.code, result.id) == (2, "usage/bad-path")

    def test_a_checkpoint(self, edgecc: Command, target: Path) -> None:
        result = edgecc("run", target, "--prompt", "a")
        assert (result.code, result.id) == (3, "bundle/is-a-checkpoint")
        assert f"edgecc compile {target} -o DIR" in result.err

    def test_a_part_of_a_bundle(self, edgecc: Command, bundle: Path) -> None:
        for path in (bundle / "weights", bundle / "bundle.json"):
            result = edgecc("run", path, "--prompt", "a")
            assert (result.code, result.id) == (3, "bundle/not-a-bundle")
            assert f"use {bundle}" in result.err

    def test_moved_copied_and_linked(
        self, edgecc: Command, bundle: Path, copy: Path, tmp_path: Path
    ) -> None:
        expected = answer(edgecc, bundle, "--prompt", PROMPT)["token_ids"]
        moved = copy.rename(tmp_path / "moved é 模")
        (tmp_path / "link").symlink_to(moved)
        for path in (moved, tmp_path / "link"):
            assert answer(edgecc, path, "--prompt", PROMPT)["token_ids"] == expected

    def test_files_missing_or_cut(self, edgecc: Command, copy: Path, bundle: Path) -> None:
        names = [p.relative_to(bundle) for p in bundle.rglob("*") if p.is_file()]
        assert len(names) >= 8
        for name in names:
            (copy / name).unlink()
            result = edgecc("run", copy, "--prompt", "a")
            assert result.code == 3, name
            assert name.name in result.err
            data = (bundle / name).read_bytes()
            (copy / name).write_bytes(data[: len(data) // 2])
            assert edgecc("run", copy, "--prompt", "a").code == 3, name
            shutil.copy(bundle / name, copy / name)
        assert edgecc("run", copy, "--prompt", "a").code == 0

    def test_models_that_are_garbage(self, edgecc: Command, copy: Path) -> None:
        for model in copy.glob("*.onnx"):
            data = model.read_bytes()
            model.write_bytes(b"\xff" * len(data))
            result = edgecc("run", copy, "--prompt", "a")
            assert (result.code, result.id) == (3, "bundle/model"), model.name
            model.write_bytes(data)


def test_a_template_that_refuses(edgecc: Command, tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", **SMALL)
    (target / "chat_template.jinja").write_text("{{ raise_exception('no systems here') }}")
    package.compile(target, out=tmp_path / "b", max_model_len=64, verify="none")
    result = edgecc("run", tmp_path / "b", "--chat", "hi")
    assert (result.code, result.id) == (2, "chat/refused-by-template")
    assert "no systems here" in result.last


class TestGrammar:
    SCHEMA = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'

    @pytest.fixture(autouse=True)
    def library(self) -> None:
        pytest.importorskip("llguidance")

    def test_each_kind(self, edgecc: Command, bundle: Path, tmp_path: Path) -> None:
        (tmp_path / "schema.json").write_text('{"enum": [true, false]}')
        (tmp_path / "digits.lark").write_text("start: /[0-9]{4}/")
        for flags, pattern in (
            (["--json-schema", tmp_path / "schema.json"], "true|false"),
            (["--json-schema", '{"const": 12}'], "12"),
            (["--regex", "[ab]{3}"], "[ab]{3}"),
            (["--choice", "yes", "--choice", "no"], "yes|no"),
            (["--lark", tmp_path / "digits.lark"], "[0-9]{4}"),
        ):
            found = answer(edgecc, bundle, "--prompt", PROMPT, *flags, "--max-new-tokens", 50)
            assert re.fullmatch(pattern, found["text"])
            assert found["finish_reason"] == "stop"

    @pytest.mark.parametrize(
        ("flags", "id"),
        [
            (["--regex", "a", "--choice", "b"], "usage/grammar"),
            (["--regex", "[a"], "grammar/bad-regex"),
            (["--json-schema", '{"type": "strin"}'], "grammar/bad-json-schema"),
            (["--json-schema", "{"], "grammar/bad-json-schema"),
            (["--json-schema", "nowhere.json"], "run/unreadable-grammar"),
            (["--lark", ""], "usage/bad-path"),
        ],
    )
    def test_refused(self, edgecc: Command, bundle: Path, flags: list[str], id: str) -> None:
        result = edgecc("run", bundle, "--prompt", PROMPT, *flags)
        assert (result.code, result.id) == (2, id)
        assert result.out == ""
