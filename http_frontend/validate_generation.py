"""A decoded request of `POST /generation` becomes protocol requests, or an error that names the field."""

from __future__ import annotations

from typing import Final

from broker.errors import InvalidRequest, UnsupportedParameter
from broker.protocol import ModelInfo, Params
from http_frontend.own_types import GenerationRequest, GenParams
from http_frontend.validate import Ask, check_params, check_prompt, prompts, seeded

# transformers' parameters that are accepted with the value that changes nothing.
HARMLESS: Final[dict[str, tuple[object, ...]]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1.0,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "early_stopping": (False,),
    "use_cache": (True,),
    "clean_up_tokenization_spaces": (False,),
    "return_dict_in_generate": (False,),
    "return_tensors": (False,),
    "return_text": (True,),
}
NOT_SERVED: Final = {
    "max_length": "use max_new_tokens",
    "min_length": "use min_new_tokens",
    "bad_words_ids": "not implemented",
    "force_words_ids": "not implemented",
    "penalty_alpha": "contrastive search isn't implemented",
    "max_time": "use max_new_tokens",
    "prefix": "put it into the prompt",
    "handle_long_generation": "shorten the prompt",
}
_SAME: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "skip_special_tokens")


def generation(body: GenerationRequest, model: ModelInfo, max_n: int) -> Ask:
    """Check a request and make its protocol requests.

    Raises:
        InvalidRequest: names the field at fault.
    """
    given = body.gen_params or GenParams()
    _refuse(given)
    for name in ("max_new_tokens", "return_full_text"):
        if getattr(body, name) is not None and getattr(given, name) is not None:
            raise InvalidRequest(f"{name}: given twice.", param=name)
    params = _params(body.max_new_tokens or given.max_new_tokens, given)
    n = given.num_return_sequences or 1
    found = prompts(body.prompt, max_n)
    if len(found) * n > max_n:
        name = "gen_params.num_return_sequences"
        raise InvalidRequest(f"{name}: more than {max_n} texts in all.", param=name)
    check_params(params, model, "max_new_tokens")
    for request in found:
        request.params = params
        check_prompt(request, model)
    return Ask(seeded(found, n, given.seed), n)


def _params(max_tokens: int | None, given: GenParams) -> Params:
    params = Params(max_tokens=max_tokens, min_tokens=given.min_new_tokens or 0)
    for name in _SAME:
        value = getattr(given, name)
        if value is not None:
            setattr(params, name, value)
    if given.do_sample is False:
        params.temperature = 0.0
    if given.stop_strings:
        params.stop = [given.stop_strings] if isinstance(given.stop_strings, str) else given.stop_strings
        params.include_stop = True  # as transformers does
    if given.eos_token_id is not None:
        ids = given.eos_token_id
        params.stop_token_ids = [ids] if isinstance(ids, int) else ids
    return params


def _refuse(given: GenParams) -> None:
    for name, harmless in HARMLESS.items():
        value = getattr(given, name)
        if value is not None and value not in harmless:
            param = f"gen_params.{name}"
            raise UnsupportedParameter(f"{param}: only {harmless[0]} is served.", param=param)
    for name, instead in NOT_SERVED.items():
        if getattr(given, name) is not None:
            param = f"gen_params.{name}"
            raise UnsupportedParameter(f"{param}: not served here: {instead}.", param=param)
