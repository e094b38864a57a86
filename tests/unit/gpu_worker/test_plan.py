"""What fits is known from the config alone, also for devices that aren't here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_worker import plan
from gpu_worker.plan import Device, Sizes, fit, parse_capability, parse_size, recommend

V100 = Device("V100", 16 * plan.GIB, (7, 0), bfloat16=False)
LLAMA_2_13B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 5120,
    "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40, "vocab_size": 32000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-2-13b")
    (folder / "config.json").write_text(json.dumps(LLAMA_2_13B))
    return folder


@pytest.fixture(scope="module")
def sizes(llama: Path) -> Sizes:
    return plan.measure(plan._config(str(llama))[1])


def test_weights_and_cache_are_those_of_the_paper(sizes: Sizes) -> None:
    assert sizes.linear_weights + sizes.other_weights == 13_015_864_320
    assert sizes.kv_values_per_token == 2 * 40 * 5120


def test_llama_2_13b_in_nf4_fits_a_v100_in_float16(sizes: Sizes) -> None:
    found = fit(sizes, V100, "nf4")
    assert V100.dtype == "float16"
    assert 6.5 < found.weights_bytes / plan.GIB < 7.5
    assert found.fits and found.requests >= 4
    assert not fit(sizes, V100, "none").fits
    assert fit(sizes, V100, "none", devices=2).fits


def test_the_recommendation_is_a_worker_per_device_where_that_fits(sizes: Sizes) -> None:
    fits = [fit(sizes, V100, q) for q in plan.QUANTIZATIONS] + [fit(sizes, V100, "none", 2)]
    assert "--quantization nf4 --dtype float16" in recommend(fits)
    small = Device("small", 4 * plan.GIB, (7, 0), bfloat16=False)
    assert "doesn't fit" in recommend([fit(sizes, small, q) for q in plan.QUANTIZATIONS])
    half = Device("half", 9 * plan.GIB // 2, (7, 0), bfloat16=False)
    spread = [fit(sizes, half, "nf4"), fit(sizes, half, "nf4", 4)]
    assert "--device 0,1,2,3" in recommend(spread)


def test_the_command_plans_for_devices_that_are_not_here(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(llama), "--device-memory", "16GiB", "--capability", "7.0", "--devices", "2"]
    assert plan.main(argv) == 0
    said = capsys.readouterr().out
    assert "2 × GPU 16GiB" in said and "float16" in said and "recommended: one worker per device" in said


def written(folder: Path, text: str) -> list[str]:
    (folder / "config.json").write_text(text)
    return ["--model", str(folder), "--device-memory", "16GiB"]


MAMBA = {
    "model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "vocab_size": 100, "state_size": 8,
}  # fmt: skip


def test_a_model_without_attention_is_planned_for_one_request_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = written(tmp_path, json.dumps(MAMBA))
    assert plan.main(argv) == plan.EXIT_NO_MODEL
    assert "set --max-context" in capsys.readouterr().err
    assert plan.main([*argv, "--max-context", "4096"]) == 0
    said = capsys.readouterr().out
    assert "one request at a time: layers of type linear_attention" in said
    assert "--slots 1" in said


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("{", "not a valid JSON"),
        ("[]", "the config can't be loaded"),
        ('{"model_type": "t5"}', "Unrecognized configuration class"),
        ('{"model_type": "llama", "num_attention_heads": "x"}', "expected int, got str"),
    ],
)
def test_a_config_that_is_no_causal_models_is_one_line(
    config: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(written(tmp_path, config)) == plan.EXIT_NO_MODEL
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1


@pytest.mark.parametrize("count", ["0", "-1", "x", "1.5"])
def test_no_devices_at_all_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan.main([f"--devices={count}", "--device-memory", "16GiB"])
    assert caught.value.code == 2
    assert "--devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [["--model", "/nowhere"], ["--device-memory", "big"], ["--device-memory", "1GiB", "--capability", "x"]],
)
def test_a_wrong_argument_is_one_line(
    argv: list[str], llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = argv if "--model" in argv else ["--model", str(llama), *argv]
    assert plan.main(argv) == plan.EXIT_NO_MODEL
    said = capsys.readouterr().err
    assert said.startswith("python -m gpu_worker plan: ")


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 16 * 2**30), ("24GB", 24 * 10**9), ("1.5 GiB", 3 * 2**29)]
)
def test_sizes_are_read_in_the_usual_units(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_capability_is_two_numbers() -> None:
    assert parse_capability("7.0") == (7, 0)
    with pytest.raises(ValueError, match=r"7\.0"):
        parse_capability("seven")
