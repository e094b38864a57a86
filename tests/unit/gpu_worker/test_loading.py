"""A model is loaded as the settings say, or one sentence says why not."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from broker.logs import Log
from gpu_worker import loading
from gpu_worker.loading import LoadError, SamplingDefaults, load
from gpu_worker.scratch import PREFIX
from gpu_worker.settings import WorkerSettings
from tests.pool import wait_for
from tests.unit.gpu_worker.tokenizers import byte_level

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model on disk, as somebody would publish it."""
    made = tmp_path_factory.mktemp("models") / "tiny-llama"
    tokenizer = byte_level()
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(made)
    tokenizer.save_pretrained(made)
    said = {
        "eos_token_id": [2, 7],
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "do_sample": True,
    }
    (made / "generation_config.json").write_text(json.dumps(said))
    return made


def settings(model: Path | str, **given: object) -> WorkerSettings:
    return WorkerSettings(model=str(model), **given)  # type: ignore[arg-type]


def quiet() -> Log:
    return Log("test", stream=io.StringIO())


def test_a_folder_is_loaded_with_what_requests_need_to_know(folder: Path) -> None:
    out = io.StringIO()
    loaded = load(settings(folder, dtype="float32", aliases="a, b"), CPU, Log("test", stream=out))
    assert (loaded.name, loaded.aliases, loaded.context) == ("tiny-llama", ("a", "b"), 256)
    assert loaded.vocab == len(byte_level()), "rows of the embedding without a token are no valid input"
    assert loaded.dtype is torch.float32 and loaded.weights_bytes > 0
    events = [json.loads(line)["event"] for line in out.getvalue().splitlines()]
    assert events == ["loading", "loaded"]


def test_a_long_load_says_how_far_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PROGRESS_S", 0.001)
    out = io.StringIO()
    load(settings(folder), CPU, Log("test", stream=out))
    told = [line for line in map(json.loads, out.getvalue().splitlines()) if line["event"] == "still loading"]
    assert told[-1]["stage"] == "reading weights"
    assert (told[-1]["shards"], told[-1]["mib"]) == (1, 0)
    assert told[-1]["memory_mib"] > 10 and told[-1]["seconds"] >= 0


def test_c39_every_source_of_end_tokens_counts(folder: Path) -> None:
    loaded = load(settings(folder), CPU, quiet())
    assert loaded.eos_ids == {2, 7, byte_level().eos_token_id}


def test_c41_the_models_own_defaults_are_known(folder: Path) -> None:
    loaded = load(settings(folder), CPU, quiet())
    assert loaded.defaults == SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_c59_quantised_weights_go_straight_to_the_device(folder: Path, quantization: str) -> None:
    loaded = load(settings(folder, quantization=quantization, dtype="float32"), CPU, quiet())
    kinds = {type(module).__name__ for module in loaded.model.modules()}
    assert ("Linear4bit" if quantization == "nf4" else "Linear8bitLt") in kinds
    if quantization == "nf4":
        weight = loaded.model.model.layers[0].mlp.up_proj.weight
        assert weight.quant_type == "nf4" and weight.quant_state.nested, "double quantised"


def test_the_context_can_be_less_and_not_more(folder: Path) -> None:
    assert load(settings(folder, max_context=64), CPU, quiet()).context == 64
    with pytest.raises(LoadError, match="--max-context 512"):
        load(settings(folder, max_context=512), CPU, quiet())


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("/nowhere/at/all", "no folder"),
        ("./nowhere", "no folder"),
        ("/nowhere/model.gguf", "no file"),
        ("no-such-owner/no-such-model", "hub can't be reached"),
        ("just-a-name", "no hub id"),
    ],
)
def test_a_model_that_is_not_there_is_one_sentence(model: str, why: str) -> None:
    with pytest.raises(LoadError, match=why) as caught:
        load(settings(model), CPU, quiet())
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json"):
        load(settings(tmp_path), CPU, quiet())


def test_weights_that_would_have_to_be_unpickled_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04pickle")
    with pytest.raises(LoadError, match="can't be loaded"):
        load(settings(tmp_path), CPU, quiet())


def copied(folder: Path, target: Path, file: str, change: Callable[[bytes], bytes]) -> Path:
    """The model with one file changed."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    (target / file).write_bytes(change((target / file).read_bytes()))
    return target


def changed(**values: object) -> Callable[[bytes], bytes]:
    return lambda text: json.dumps({**json.loads(text), **values}).encode()


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        ("model.safetensors", lambda data: data[: len(data) // 2], "not fully covered"),
        ("model.safetensors", lambda data: b"", "header too small"),
        ("config.json", lambda data: b"[]", "must be a mapping"),
        ("config.json", changed(num_attention_heads="x"), "expected int, got str"),
        (
            "config.json",
            changed(num_hidden_layers=3),
            r"aren't complete: 9 tensors are missing, such as model",
        ),
        ("config.json", changed(vocab_size=300), r"is \(400, 32\) and should be \(300, 32\)"),
        ("config.json", changed(model_type="bert", architectures=["BertModel"]), "aren't complete"),
        ("tokenizer.json", lambda data: b"{}", "the tokenizer can't be loaded: KeyError"),
        ("generation_config.json", lambda data: b"{", r"generation_config\.json is no JSON object"),
        ("generation_config.json", changed(temperature="hot"), r"generation_config .*\$\.temperature"),
        ("generation_config.json", changed(repetition_penalty=-1.0), r"\$\.repetition_penalty"),
    ],
)
def test_broken_files_are_one_sentence_and_nothing_random_is_served(
    folder: Path, tmp_path: Path, file: str, change: Callable[[bytes], bytes], why: str
) -> None:
    broken = copied(folder, tmp_path / "broken", file, change)
    with pytest.raises(LoadError, match=why) as caught:
        load(settings(broken), CPU, quiet())
    assert "\n" not in str(caught.value)


def test_weights_that_the_model_does_not_use_are_told(folder: Path, tmp_path: Path) -> None:
    fewer = copied(folder, tmp_path / "fewer", "config.json", changed(num_hidden_layers=1))
    out = io.StringIO()
    load(settings(fewer), CPU, Log("test", stream=out))
    (told,) = [
        line for line in map(json.loads, out.getvalue().splitlines()) if line["event"] == "weights unused"
    ]
    assert (told["tensors"], told["such_as"]) == (9, "model.layers.1.input_layernorm.weight")


@pytest.mark.parametrize(("trusted", "brought"), [(False, False), (True, True)])
def test_a_hub_models_python_is_brought_only_if_it_may_run(
    folder: Path, trusted: bool, brought: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(repository: str, **given: object) -> str:
        asked.update(given, repository=repository)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    wanted = settings("owner/name", revision="abc", trust_remote_code=trusted)
    assert loading.locate("owner/name", wanted, quiet()) == str(folder)
    assert (asked["repository"], asked["revision"]) == ("owner/name", "abc")
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert ("*.py" in patterns) == brought
    assert "*.safetensors" in patterns and "*.bin" not in patterns


def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(LoadError, match=r"broken\.gguf can't be read") as caught:
        load(settings(path, cache_dir=str(tmp_path / "cache")), CPU, quiet())
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == [], "nothing half converted stays"


def prepared(folder: Path) -> Callable[[Path, Path, Log], None]:
    """In the place of a conversion: its result is there already."""

    def convert(gguf: Path, target: Path, log: Log) -> None:
        shutil.copytree(folder, target, dirs_exist_ok=True)

    return convert


def gguf_file(directory: Path) -> Path:
    path = directory / "model.gguf"
    path.write_bytes(b"not a model")
    return path


def test_what_a_killed_conversion_left_goes_whether_or_not_there_is_something_to_convert(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_convert", prepared(folder))
    chosen = settings(gguf_file(tmp_path), cache_dir=str(tmp_path / "cache"))
    for _ in range(2):
        left = tmp_path / "cache" / "gguf" / f"{PREFIX}abc"
        left.mkdir(parents=True)
        (left / "model.safetensors").touch()
        source = loading.locate(chosen.model, chosen, quiet())
        assert list(left.parent.iterdir()) == [Path(source)]


def test_a_conversion_that_another_worker_has_finished_meanwhile_is_as_good(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(gguf_file(tmp_path), cache_dir=str(tmp_path / "cache"))
    convert, others = prepared(folder), []

    def slow(gguf: Path, target: Path, log: Log) -> None:
        monkeypatch.setattr(loading, "_convert", convert)
        others.append(loading.locate(chosen.model, chosen, quiet()))
        convert(gguf, target, log)

    monkeypatch.setattr(loading, "_convert", slow)
    source = loading.locate(chosen.model, chosen, quiet())
    assert others == [source] and list((tmp_path / "cache" / "gguf").iterdir()) == [Path(source)]


def test_a_cache_that_can_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    chosen = settings(gguf_file(tmp_path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(LoadError, match="--cache-dir: .*cache can't be written: Not a directory"):
        load(chosen, CPU, quiet())


def test_a_long_conversion_is_called_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PROGRESS_S", 0.001)
    out = io.StringIO()

    def convert(gguf: Path, target: Path, log: Log) -> None:
        wait_for(lambda: "still loading" in out.getvalue(), "a word about it")
        prepared(folder)(gguf, target, log)

    monkeypatch.setattr(loading, "_convert", convert)
    load(settings(gguf_file(tmp_path), cache_dir=str(tmp_path / "cache")), CPU, Log("test", stream=out))
    told = [line for line in map(json.loads, out.getvalue().splitlines()) if line["event"] == "still loading"]
    assert told[0]["stage"] == "converting the GGUF file"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("/m/model.v2.gguf", "model.v2"),
        ("meta-llama/Llama-2-13b", "meta-llama/Llama-2-13b"),
    ],
)
def test_a_models_name_is_its_own_without_the_format(path: str, name: str) -> None:
    assert loading.name_of(path) == name


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 0), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_a_v100_computes_in_float16(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert loading.choose_dtype("auto", torch.device("cuda:0")) is dtype


def test_an_old_processor_computes_in_float32(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("flags : fpu sse avx2 avx512f\n")
    (tmp_path / "new").write_text("flags : fpu avx512f avx512_bf16\n")
    assert not loading.cpu_has_bfloat16(tmp_path / "old")
    assert loading.cpu_has_bfloat16(tmp_path / "new")
    assert not loading.cpu_has_bfloat16(tmp_path / "missing")
