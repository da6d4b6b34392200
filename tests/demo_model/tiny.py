"""Makes the bundled tiny model: ``python -m tests.demo_model.tiny configs/models/tiny``.

It is a Llama with random weights, and a tokenizer trained on text generated here from common English words. The result
is the same on every machine, and nothing is downloaded. Its answers make no sense, but it exercises the same code as a
real model, on any laptop, in a second.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

VOCAB = 4096
HIDDEN = 64
SEED = 20
SENTENCES = 30_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Words split as Llama 3 does: contractions, words with one leading space or sign, digits by threes, signs, blanks.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SMALL = """the of and to in a is that it was for on are as with his they at be this from I have or by one had not but
what all were when we there can an your which their said if do will each about how up out them then she many some so
these would other into has more her two like him see time could no make than first been its who now people my made
over did down only way find use may water long little very after words called just where most know get through back
much before go good new write our used me man too any day same right look think also around another came come work
three word must because does part even place well such here take why things help put years different away again off
went old number great tell men say small every found still between name should home big give air line set own under
read last never us left end along while might next sound below saw something thought both few those always looked
show large often together asked house world going want school important until form food keep children feet land side
without boy once animals life enough took sometimes four head above kind began almost live page got earth need far
hand high year mother light parts country father let night following picture being study second eyes soon times story
boys since white days ever paper hard near sentence better best across during today others however sure means knew
told young miles sun ways thing whole hear example heard several change answer room sea against top turned learn
point city play toward five using himself usually money seen didn't car morning given order red door sure become
tree"""

NOUNS = """ability access account act action activity address advantage advice afternoon age agreement amount animal
assistant apple area argument arm army art article attention author baby bag ball band bank base battle bear beauty
bed bell bird birth bit blood board boat body book bottle bottom box brain bread break bridge brother building bus
business butter cake call camera camp capital captain card care case cat cause cell center century chain chair
chance chapter character charge child choice church circle class clock cloth cloud coast coat code coffee cold
college color community company computer condition connection control conversation copy corn corner cost council
couple course court cow cream crowd culture cup current customer dance danger data date daughter dead deal death
decision degree department design desk detail development dinner direction discussion disease distance doctor
document dog dollar dream dress drink driver duty ear east economy edge education effect effort egg electricity
element email energy engine engineer environment equipment error evening event evidence exam exercise experience
expert explanation expression face fact factory failure fall family farm farmer fear feature feeling field fight
figure film finger fire fish flight floor flower foot force forest fox friend front fruit fun function future game
garden gas gate girl glass goal god gold government grass ground group growth guess guest guide gun habit hair half
hall hat health heart heat height hill history hole holiday horse hospital hotel hour husband ice idea image income
increase industry information instance interest internet island issue item job journey judge key king kitchen
knowledge lady lake language law lawyer leader leaf leg length lesson letter level library lie list location lock
loss love lunch machine magazine manager map mark market marriage master match material matter meal meaning measure
meat media medicine meeting member memory message metal method middle milk mind mine minute mirror mistake model
moment month moon mountain mouse mouth movement movie music nation nature neck network news noise north nose note
object ocean offer office oil opinion opportunity orange owner pain paint pair parent park party past path pattern
peace pen pencil performance period person phone photo phrase piece plan plane planet plant plate player poem poet
police policy position potato pound power practice president pressure price prince problem process product program
progress project promise prompt property purpose quality queen question race radio rain range rate reader reality
reason record region relationship report request research response rest result rice ring risk river road rock role
roof root rose rule safety salt sand scale scene science scientist screen season seat secret section seed sense
series server service shape ship shirt shoe shop shoulder sign silence silver sister situation size skill skin sky
sleep smell smile smoke snow society soil soldier solution son song soul source south space speech speed spirit
sport spot spring square staff stage standard star start state statement station step stock stone store storm
stranger stream street strength structure student style subject success sugar suggestion summer surface surprise
system table talk task taste tax tea teacher team technology television temperature test text theory thousand throat
ticket title token tomorrow tongue tool tooth touch tour town trade traffic train travel treatment trip trouble
truck truth turn type uncle unit university user valley value variety version victory video view village visit voice
wall war watch wave weather website week weight west wheel wife wind window wine wing winter woman wonder wood
worker writer yard yesterday"""

VERBS = """accept add admit agree allow appear apply argue arrive ask attack avoid bake beat become begin believe
belong blow borrow bring build burn buy carry catch check choose claim clean clear climb close collect compare
complain complete connect consider contain continue cook count cover create cross cry cut decide deliver depend
describe destroy develop die discover discuss divide draw drive drop earn eat enjoy enter escape examine exist expect
explain explore express fail feel fill finish fit fix fly follow forget forgive gather grow happen hate hide hit hold
hope hunt hurry imagine improve include inform introduce invent invite join jump kick kill kiss lack laugh lay lead
leave lend lift listen lose manage marry meet mention miss mix move notice obtain open own pass pay perform pick
please pour prefer prepare present press prevent print produce protect prove provide publish pull push raise reach
receive recognize reduce refuse remain remember remove repair repeat replace reply require return ride rise roll run
save search sell send separate serve share shine shoot shout shut sing sit solve speak spend spread stand stay steal
stop study succeed suffer suggest summarize support suppose swim teach tear thank throw tie touch translate treat try
understand wait wake walk want warn wash wear win wish write"""

ADJECTIVES = """able afraid alone angry available aware bad beautiful black blue brave bright broken brown busy careful
central certain cheap clean clear clever common complex correct dangerous dark deep dry early easy empty english equal
exact exciting famous fast favorite final fine flat foreign free fresh friendly full funny general gentle gray green
happy healthy heavy helpful hot huge hungry international kind late lazy local lonely loud low lucky main modern
narrow national natural necessary nervous nice normal open perfect personal physical plain pleasant polite poor
popular possible powerful present pretty private proud public quick quiet rare ready real recent rich rough round sad
safe serious sharp short sick silent similar simple single slow smart social soft special specific strange strong
sudden sweet tall technical terrible thick thin tired tiny total true useful usual warm wet wide wild wise wonderful
wrong yellow"""

ADVERBS = """actually already badly carefully certainly clearly completely easily especially everywhere exactly fairly
finally forever generally hardly hopefully immediately indeed instead later less likely loudly mainly maybe nearly
nowhere obviously perhaps possibly probably quickly quietly quite rather really recently seldom simply slowly somehow
straight suddenly therefore tonight twice unfortunately"""

SHAPES = (
    "The {a} {n} {v}s the {n} of the {n}.",
    "{s} {s} {n} {s} {s} {a} {n}, {s} {s} {n} {s} {s}.",
    "I {v} {d} when the {n} is {a}, but they {v} it {d}.",
    "Can you {v} the {n} and {v} a {a} {n} for me?",
    '"{s} {s} {n}," she said, "is {d} {a} in the {n}."',
    "We were {v}ing {s} {n}s and {v}ing {s} {a} {n}s in {y}.",
    "Please {v} a {a} {n} about the {n}s: {v} {k} {n}s, {v} the {n}; don't {v} it.",
    "He {v}ed {s} {s} {n} ({s} {n}) and it's {a}er than {s} {n}.",
    "What is the {n} of {n} and {n}? It is {k}.{k}, {d}.\n",
    "{n}s - {a}, {a} or {a} - {s} {s} {v} {s} {n}!\n\n",
    "You'll {v} that we're {a}; they've {v}ed what I'd {v}.",
)

TEMPLATE = """{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text if part.type == 'text' else '' }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ text(messages[0].content) }}

{% endif %}# Tools

Call a function by answering with <tool_call>{"name": ..., "arguments": ...}</tool_call>. Functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ text(messages[0].content) }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
<|im_start|>{{ message.role }}
{{ text(message.content) }}<|im_end|>
{% elif message.role == 'assistant' -%}
<|im_start|>assistant
{{ text(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call %}
<tool_call>{"name": "{{ function.name }}", "arguments": {{ function.arguments if function.arguments is string else
function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{% elif message.role == 'tool' -%}
<|im_start|>tool
{{ text(message.content) }}<|im_end|>
{% elif message.role != 'system' -%}
{{ raise_exception('roles are system, user, assistant and tool, not ' + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# tiny

A two-layer Llama with **random weights**, for trying and testing the pipeline. It has learned nothing and says
nothing sensible; everything else about it is that of a real model: byte-level BPE tokenizer (4,096 tokens, trained
on made-up prose of common English words), ChatML template with tools, positions up to 131,072, safetensors in
bfloat16. It loads unchanged with `AutoTokenizer` and `AutoModelForCausalLM`.

Made by `python -m tests.demo_model.tiny configs/models/tiny`, which gives the same files every time.
"""


def prose(sentences: int, seed: int = SEED) -> Iterator[str]:
    """Meaningless paragraphs, in which earlier and shorter words are more frequent."""
    random = Random(seed)
    lists = {kind: text.split() for kind, text in zip("snvad", (SMALL, NOUNS, VERBS, ADJECTIVES, ADVERBS), strict=True)}
    for kind in "nvad":
        lists[kind].sort(key=lambda word: (len(word), word))

    def fill(piece: str) -> str:
        # Only random() is the same in every version of Python. The power favours the first words.
        if piece in lists:
            return lists[piece][int(random.random() ** 1.2 * len(lists[piece]))]
        if piece in ("k", "y"):
            return str(int(random.random() * 1000) if piece == "k" else 1900 + int(random.random() * 130))
        return piece

    for first in range(0, sentences, 8):
        paragraph = []
        for number in range(first, first + 8):
            text = "".join(map(fill, SHAPES[number % len(SHAPES)].replace("}", "{").split("{")))
            text = re.sub(r"e(ed|er|ing)\b", r"\1", text)
            paragraph.append(re.sub("[A-Za-z]", lambda letter: letter[0].upper(), text, count=1))
        yield " ".join(paragraph)


def write_tokenizer(directory: Path) -> list[str]:
    """Train and save the tokenizer; returns the text of each token by id."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose(SENTENCES), trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "bos_token": None,
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": 131072,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    return [tokenizer.decode([token], skip_special_tokens=False) for token in range(VOCAB)]


def write_weights(directory: Path, texts: list[str]) -> None:
    """Random weights that keep activations near 1, so that rounding stays far below the gaps between logits.

    Whole words are the likelier tokens, so that an answer looks like text.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    end, start, stop = (VOCAB - len(SPECIAL) + i for i in range(len(SPECIAL)))
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=end,
        dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    words = {word for text in prose(SENTENCES) for word in re.findall("[A-Za-z]+", text)}
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                scale = 1.0 if name == "model.embed_tokens.weight" else weight.shape[1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            if name == "lm_head.weight":
                weight[torch.tensor([text[:1] != " " or text[1:] not in words for text in texts])] *= 0.4
                weight[start] = 0
    model.generation_config = GenerationConfig(eos_token_id=[stop, end], pad_token_id=end)
    model.save_pretrained(directory)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory, write_tokenizer(directory))
    (directory / "README.md").write_text(CARD, encoding="utf-8")
    for path in directory.iterdir():
        path.chmod(0o644)  # safetensors makes its files readable for the owner only


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    make(parser.parse_args().directory)
