"""Settings from file, --set and flags: which one wins, and how a wrong one is named."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from epd.cli.configure import options
from epd.cli.configure.settings import (
    GONE,
    build_settings,
    constants,
    flatten,
    gateway_config,
    leaves,
)
from epd.cli.configure.speculative import read_flag
from epd.cli.parser import Parser
from epd.cli.verbs import run
from epd.config import ConfigError, GatewayConfig, Settings
from epd.setting import Setting
from epd_lab.diagrams.settings_page import page

TOML = """
model_name = "tiny"
[timing]
lost_after_s = 9
[prefill]
pool_nbytes = "64MiB"
"""


def write(tmp_path: Path, text: str, name: str = "epd.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_nothing_given_is_the_default() -> None:
    assert build_settings() == Settings()


def test_every_leaf_has_a_key_and_a_default_that_passes() -> None:
    defaults = flatten(Settings())
    assert list(defaults) == list(leaves())
    given = [f"{key}={value}" for key, value in defaults.items() if value not in ("", True, False)]
    assert build_settings(assignments=given) == Settings()


def test_every_setting_says_what_it_is_and_every_constant_why() -> None:
    assert all(one.text for one in (*leaves().values(), *constants().values()))
    assert not {*leaves()} & {*constants(), *GONE}
    for key in (*constants(), *GONE):
        with pytest.raises(ConfigError, match=f"--set: {key} is fixed .*no setting any more: "):
            build_settings(assignments=[f"{key}=1"])


def test_every_flag_becomes_its_setting() -> None:
    parser = Parser("epd run")
    run.add_arguments(parser)
    flags = {one.flag: one for one in leaves().values() if one.flag}
    found = {a.option_strings[0]: a.dest for a in parser._actions if a.dest in leaves()}
    assert found == {flag: one.key for flag, one in flags.items()}
    given = [word for one in flags.values() for word in as_flag(one)]
    settings = flatten(options.settings_of(parser.parse(["--role", "all", *given])))
    for one in flags.values():
        assert settings[one.key] == (True if one.type is bool else flatten(Settings())[one.key])


def as_flag(one: Setting) -> tuple[str, ...]:
    """As a user would write its default; nothing for an empty one, which no flag can say."""
    if one.type is bool:
        return (one.flag,)
    return (one.flag, one.in_words(one.default)) if one.in_words(one.default) else ()


def test_bounds_hold_where_a_process_is_told_its_configuration() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"limits\.max_images"):
        msgspec.convert({"limits": {"max_images": 0}}, GatewayConfig)


def test_the_page_of_settings_is_up_to_date() -> None:
    path = Path(__file__).parents[2] / "docs" / "settings.md"
    assert path.read_text(encoding="utf-8") == page(), "run: python -m epd diagrams"


def test_file_then_set_then_flags(tmp_path: Path) -> None:
    settings = build_settings(
        write(tmp_path, TOML),
        ["timing.lost_after_s=8", "limits.max_images=3"],
        {"limits.max_images": 2, "port": None},
    )
    assert settings.model_name == "tiny"
    assert settings.prefill.pool_nbytes == 64 << 20
    assert settings.timing.lost_after_s == 8.0
    assert settings.limits.max_images == 2
    assert settings.port == 8000


def test_json_says_the_same_as_toml(tmp_path: Path) -> None:
    json = (
        '{"model_name": "tiny", "timing": {"lost_after_s": 9}, "prefill": {"pool_nbytes": "64M"}}'
    )
    as_json = build_settings(write(tmp_path, json, "epd.json"))
    assert as_json == build_settings(write(tmp_path, TOML))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[timing]\nlost_aftr_s = 1",
            "timing.lost_aftr_s is not a setting; did you mean timing.lost",
        ),
        ("lost_after_s = 1", "did you mean timing.lost_after_s"),
        ("colour = 1", "--show-config lists all"),
        ("timing = 1", "timing is not a setting"),
        ("[timing]\nlost_after_s = 'soon'", "lost_after_s must be a number, not 'soon'"),
        ("[limits]\nmax_images = 1.5", "max_images must be a whole number"),
        ("[limits]\nmax_images = 0", "max_images is 0; it must be above zero"),
        ("[limits]\nallow_private_networks = 1", "must be true or false"),
        ("[engine]\nkv_nbytes = 'much'", "kv_nbytes: 'much' is no size"),
        ("[engine]\ndtype = 'bfloat61'", "did you mean bfloat16"),
        ("reasoning_parser = 'qwen'", "did you mean qwen3"),
        ("chat_template = '/nowhere/x.jinja'", "a file that can be read"),
        ("[engine]\ndevice = 'cuda:x'", "it must be cpu"),
        ("[engine]\nthreads = -1", "may not be negative"),
        ("[engine]\ngpu_memory_utilization = 1.5", "a share is at most 1"),
        ("[timing]\nlost_after_s = inf", "finite"),
        ("port = 65536", "at most 65535"),
        ("[mooncake]\nmax_port = 70000", "at most 65535"),
        ("encode_policy = 'round-robin'", "did you mean round_robin"),
        ("[timing]\nlost_after_s = 1.0", "must grow"),
        ("[timing]\nstall_timeout_s = 20", "must be less than"),
        ("host = [", "is not TOML"),
        ("[timing]\ntombstone_s = 9", "fixed at 60.0 and no setting any more: it must outlive"),
        ("[limits]\nmax_redirects = 9", "no setting any more: an URL may redirect 3 times"),
        ("otlp_traces_endpoint = 'collector'", "OTLP over HTTP"),
        ("[engine]\nmax_itl_impact = 0.5", "must be above 1"),
        ("[engine]\ncpu_affinity = '0-1|x'", "x"),
        ("transport = 'shm,tpc'", "did you mean tcp?"),
        ("transport_options = '[]'", "a JSON object"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_settings(write(tmp_path, text))
    assert said in str(caught.value)
    if said not in ("must grow", "must be less than"):
        assert "epd.toml" in str(caught.value)


def test_ports_of_mooncake_are_a_span(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mooncake.max_port must be above"):
        build_settings(write(tmp_path, "[mooncake]\nmin_port = 20000\nmax_port = 20000"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        build_settings(tmp_path / "none.toml")


def test_set_needs_a_value() -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        build_settings(assignments=["timing.lost_after_s"])


def speculative(text: str) -> dict[str, object]:
    settings = build_settings(flags=read_flag(text))
    return dict(flatten(settings.engine.speculative))


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ('"prompt_lookup_min":2,"prompt_lookup_max":4', (2, 4)),
        ('"prompt_lookup_max":3', (3, 3)),
        ('"prompt_lookup_min":2', (2, 2)),
        ('"prompt_lookup_max":null', (5, 5)),
    ],
)
def test_speculative_config_reads_as_vllm_does(given: str, lookup: tuple[int, int]) -> None:
    found = speculative('{"method":"ngram","num_speculative_tokens":4,' + given + "}")
    assert found["method"] == "ngram"
    assert found["num_speculative_tokens"] == 4
    assert (found["prompt_lookup_min"], found["prompt_lookup_max"]) == lookup


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{method", "is not JSON"),
        ("[4]", "must be a JSON object"),
        ('{"method":"ngram","num_speculative_token":4}', "did you mean num_speculative_tokens?"),
        ('{"tree":2,"num_speculative_tokens":4}', "it takes method, num_speculative_tokens"),
        ('{"num_speculative_tokens":4}', "names no method"),
        ('{"method":"eagle","num_speculative_tokens":4}', "must be one of ngram, mtp, eagle3"),
        ('{"method":"eagle3","num_speculative_tokens":3}', "eagle3 needs one"),
        ('{"method":"mtp","num_speculative_tokens":3,"model":"a"}', "eagle3 needs one"),
        ('{"method":"qwen3_next_mtp"}', "num_speculative_tokens is missing"),
        ('{"method":"ngram"}', "num_speculative_tokens is missing"),
        ('{"method":"ngram","num_speculative_tokens":"4"}', "must be a whole number"),
        ('{"method":"ngram","num_speculative_tokens":-4}', "may not be negative"),
        ('{"method":"ngram","num_speculative_tokens":99}', "at most 64"),
        (
            '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":6,"prompt_lookup_max":2}',
            "lower the first or raise the second",
        ),
    ],
)
def test_a_wrong_speculative_config_says_what_to_do(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        speculative(text)


@pytest.mark.parametrize("name", ["mtp", "qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp"])
@pytest.mark.parametrize("number", [0, 3])
def test_drafts_by_the_models_layer_have_vllms_names(name: str, number: int) -> None:
    found = speculative(f'{{"method":"{name}","num_speculative_tokens":{number}}}')
    assert (found["method"], found["num_speculative_tokens"]) == ("mtp", number)


def test_an_eagle_head_has_its_directory() -> None:
    found = speculative('{"method":"eagle3","model":"/heads/a","num_speculative_tokens":3}')
    assert (found["method"], found["model"]) == ("eagle3", "/heads/a")


def test_a_part_of_it_alone_needs_the_method() -> None:
    with pytest.raises(ConfigError, match=r"needs engine\.speculative\.method"):
        build_settings(assignments=["engine.speculative.prompt_lookup_min=2"])


def test_lists_are_written_with_commas_or_as_lists() -> None:
    for given in ("access.api_keys=a,b", 'access.api_keys=["a", "b"]'):
        assert build_settings(assignments=[given]).access.api_keys == ("a", "b")
    for given, words in (
        ("access.api_keys=a,,b", "may be empty"),
        ("access.api_keys=3", "a list of texts"),
        ("limits.allowed_local_media_path=/no/such/directory", "a directory"),
        ("engine.lora.runtime_dir=/no/such/directory", "a directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_settings(assignments=[given])


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gateway_config(Settings(), "g", "").access.api_keys == ()
    monkeypatch.setenv("EPD_API_KEY", "one,two")
    assert gateway_config(Settings(), "g", "").access.api_keys == ("one", "two")
    settings = build_settings(assignments=["access.api_keys=flag"])
    assert gateway_config(settings, "g", "").access.api_keys == ("flag",)
