"""Go's template language: what each construct prints, what is refused, that everything ends.

Expected texts follow https://pkg.go.dev/text/template.
"""

import random
from datetime import date

import pytest

from localllm.text.go_parser import TemplateError
from localllm.text.go_template import GoTemplate, Record

MESSAGE = Record({"Role": "user", "Content": "hi"}, {"role": "user", "content": "hi"})
DATA = {
    "Name": "Ada",
    "Empty": "",
    "Yes": True,
    "Count": 3,
    "Items": ["a", "b", "c"],
    "None": [],
    "Map": {"x": 1, "y": [True, None, "ü<"]},
    "Message": MESSAGE,
    "Messages": [MESSAGE, MESSAGE],
}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("plain", "plain"),
        ("a {{ .Name }} b", "a Ada b"),
        ("a  {{- .Name -}}  b", "aAdab"),
        ("a {{- /* note }} */ -}} b", "ab"),
        ("a {{/* note */}} b", "a  b"),
        ("{{ .Missing }}{{ .Missing.Deep }}|", "|"),
        ('{{ "}}" }}{{ `a"\n` }}{{ "\\n\\u00fc" }}', '}}a"\n\nü'),
        ("{{ 'a' }} {{ -3 }} {{ 0x10 }} {{ 1.5 }}", "97 -3 16 1.5"),
        ("{{ if .Yes }}1{{ else }}2{{ end }}", "1"),
        ("{{ if .Empty }}1{{ else if .None }}2{{ else if .Count }}3{{ else }}4{{ end }}", "3"),
        ("{{ if not .Map }}1{{ end }}{{ if .Message }}2{{ end }}", "2"),
        ("{{ with .Name }}{{ . }}{{ $.Count }}{{ else }}x{{ end }}", "Ada3"),
        ("{{ with .Empty }}{{ . }}{{ else with .Name }}b{{ . }}{{ end }}", "bAda"),
        ("{{ range .Items }}{{ . }},{{ end }}", "a,b,c,"),
        ("{{ range $i, $e := .Items }}{{ $i }}{{ $e }}{{ end }}", "0a1b2c"),
        ("{{ range $e := .Items }}{{ $e }}{{ end }}", "abc"),
        ("{{ range $k, $v := .Map }}{{ $k }}={{ $v }};{{ end }}", "x=1;y=[true  ü<];"),
        ("{{ range .None }}1{{ else }}empty{{ end }}", "empty"),
        ("{{ range .Missing }}1{{ else }}empty{{ end }}", "empty"),
        ("{{ range $i := 3 }}{{ $i }}{{ end }}", "012"),
        (
            '{{ range .Items }}{{ if eq . "b" }}{{ continue }}{{ end }}{{ . }}{{ end }}',
            "ac",
        ),
        ('{{ range .Items }}{{ if eq . "b" }}{{ break }}{{ end }}{{ . }}{{ end }}', "a"),
        ("{{ $x := 1 }}{{ if .Yes }}{{ $x = 2 }}{{ end }}{{ $x }}", "2"),
        ("{{ $x := 1 }}{{ if .Yes }}{{ $x := 2 }}{{ end }}{{ $x }}", "1"),
        ("{{ $last := -1 }}{{ range $i, $_ := .Items }}{{ $last = $i }}{{ end }}{{ $last }}", "2"),
        ("{{ if $n := .Name }}{{ $n }}{{ end }}", "Ada"),
        ('{{ and .Yes .Name "z" }} {{ and .Empty .Name }}|{{ or .Empty .Name }}', "z |Ada"),
        ("{{ or .Empty .None }}{{ and .Yes (not .Empty) }}", "[]true"),
        ("{{ or .Yes (index .Items 9) }}", "true"),
        ('{{ eq .Name "x" "Ada" }} {{ ne .Name "x" }} {{ eq 1 2 }}', "true true false"),
        ("{{ lt 1 2 }}{{ le 2 2 }}{{ gt 1 2 }}{{ ge .Count 3 }}", "truetruefalsetrue"),
        ("{{ len .Items }} {{ len .Name }} {{ len .Map }}", "3 3 2"),
        ("{{ index .Items 1 }}{{ index .Map `y` 2 }}{{ (index .Messages 0).Role }}", "bü<user"),
        ("{{ slice .Items 1 }}{{ slice .Items 1 2 }}{{ slice .Name 1 }}", "[b c][b]da"),
        ("{{ eq (len (slice .Items 2)) 1 }}", "true"),
        ("{{ .Map }} {{ .Message }}", '{"x":1,"y":[true,null,"ü<"]} {"role":"user","content":"hi"}'),
        ("{{ json .Items }}{{ .Message | json }}", '["a","b","c"]{"role":"user","content":"hi"}'),
        ("{{ .Items | len | eq 3 }}", "true"),
        ('{{ printf "%s-%d-%v-%q-%t%%" .Name .Count .Items .Name .Yes }}', 'Ada-3-[a b c]-"Ada"-true%'),
        ('{{ print 1 2 "a" 3 }}{{ println .Name }}', "1 2a3Ada\n"),
        ("{{ currentDate }}", date.today().isoformat()),
        ("{{ with $m := .Message }}{{ $m.Role }}{{ .Content }}{{ end }}", "userhi"),
        ("{{ if eq .Message.Role `user` -}} \n u \n{{- end }}", "u"),
        ("{{ true }} {{ nil }}|", "true |"),
        ("{{ toTypeScriptType .Map }}", "any"),
    ],
)  # fmt: skip
def test_constructs_print_what_go_prints(source, expected) -> None:
    assert GoTemplate(source).run(DATA) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("\n\n{{ if .A }}x", "line 3: if has no end"),
        ("{{ range .A }}x{{ else }}", "range has no end"),
        ("x{{ end }}", "unexpected {{end}}"),
        ("{{ .A", "unclosed action"),
        ("{{ }}", "an empty action"),
        ('\n{{ "a }}', "line 2"),
        ("{{ § }}", "unexpected"),
        ("{{ nothing .A }}", 'function "nothing" not defined'),
        ("{{ .A | .B }}", "only a function"),
        ("{{ .A .B }}", "only functions take arguments"),
        ("{{ (.A }}", "unclosed parenthesis"),
        ("{{ .A) }}", "unexpected"),
        ("{{ if }}x{{ end }}", "a value is missing"),
        ("{{ break }}", "break outside of a range"),
        ('{{ define "x" }}{{ end }}', "define is not supported"),
        ('{{ template "x" . }}', "template is not supported"),
        ("{{ if .A }}{{ else x }}{{ end }}", "after else"),
        ("{{ $x = 1 }}", "undefined variable $x"),
        ("{{ $x }}", "undefined variable $x"),
        ("{{ index .Items 3 }}", "out of range"),
        ("{{ slice .Items 2 1 }}", "out of range"),
        ("{{ len .Count }}", "no length"),
        ("{{ eq .Name 1 }}", "cannot be compared"),
        ("{{ lt .Yes 1 }}", "cannot be compared"),
        ("{{ not }}", "wrong number"),
        ("{{ .Message.Nope }}", "no field Nope"),
        ("{{ .Name.Nope }}", "no field Nope"),
        ("{{ range .Name }}{{ end }}", "no items"),
        ('{{ printf "%9d" 1 }}x{{ printf "%z" 1 }}', "printf"),
        ("{{ and }}", "a value is missing"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(source, reason) -> None:
    with pytest.raises(TemplateError) as caught:
        GoTemplate(source).run(DATA)
    assert reason in str(caught.value)
    assert str(caught.value).startswith("template error: line ")


@pytest.mark.parametrize(
    "source",
    [
        "{{ range 1000000000 }}x{{ end }}",
        "{{ range $.L }}{{ range $.L }}{{ range $.L }}x{{ end }}{{ end }}{{ end }}",
        "{{ $x := `0123456789` }}{{ range 100 }}{{ $x = print $x $x }}{{ end }}",
        "{{ range $.L }}{{ range $.L }}{{ $.Big }}{{ end }}{{ end }}",
        "{{ range $.L }}{{ range $.L }}{{ json $.L }}{{ end }}{{ end }}",
    ],
)
def test_endless_templates_are_stopped(source) -> None:
    with pytest.raises(TemplateError, match=r"too (much|long)"):
        GoTemplate(source).run({"L": list(range(3000)), "Big": "x" * 100_000})


@pytest.mark.parametrize(
    "source",
    [
        "{{ if .A }}" * 1000 + "{{ end }}" * 1000,
        "{{ " + "(" * 1000 + ".A" + ")" * 1000 + " }}",
        "{{ if .A }}1" + "{{ else if .A }}2" * 1000 + "{{ end }}",
        "x" * (1 << 19),
    ],
)
def test_oversized_templates_are_refused(source) -> None:
    with pytest.raises(TemplateError):
        GoTemplate(source)


def test_garbage_is_an_error_or_a_text() -> None:
    rng = random.Random(3)
    parts = ["{{", "}}", "{{-", "-}}", " ", "if", "range", "end", "else", ".A", "$x", ":=", "|"]
    parts += ["(", ")", '"', "`", "1", "eq", "len", "\n", "/*", "*/", "with", ",", "slice"]
    for _ in range(3000):
        source = "".join(rng.choices(parts, k=rng.randrange(1, 14)))
        try:
            assert isinstance(GoTemplate(source).run(DATA), str)
        except TemplateError as error:
            assert "\n" not in str(error)  # noqa: PT017
