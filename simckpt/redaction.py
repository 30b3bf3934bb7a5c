"""What looks like a secret: names of files, and lines of a diff. A secret that looks like none is not recognised.

Too much is left out rather than too little: a diff that lacks a line says so, and a secret that was stored is lost.
"""

from __future__ import annotations

import re

# by parts of a path, lower case; `tokenizer.py` is no secret
_NAME = re.compile(
    r"\.env.*|\.?netrc|\.npmrc|\.pypirc|\.htpasswd|kubeconfig|id_(rsa|dsa|ecdsa|ed25519).*"
    r"|.*(secret|token(?!iz)|credential|passw|api_?key|private_?key).*|.*\.(pem|key|p12|pfx|jks|kdbx|keystore|ppk|asc|gpg)"
)
_STRONG = re.compile(
    r"(?i:(api|access|secret|private|auth|account|license|encryption|signing|storage|master|ssh)[_\s-]?key|secret"
    r"|passw(or)?[dt]|passphrase|passcode|credential|authorization|webhook|cookie|connection_?string"
    r"|(?<![A-Za-z])((pwd|pw|pswd|dsn|creds)(?![A-Za-z])|pass(?=[\"'\]]*\s*[:=])))"
    r"|[a-z]Pass(?=[\"'\]]*\s*[:=])|[A-Z0-9]_KEY(?![A-Z])"
)
# tokens also are what language models count and split text into
_TOKEN = r"(?<!num_)(?<!max_)(?<!max-)(?<!\bn_)token(?!iz)"
_WEAK = re.compile(rf"(?i:{_TOKEN}|bearer|jwt|(?<![A-Za-z])(login|auth|authenticate)(?![A-Za-z]))")
# a text in quotes of at least 6 characters, one in triple quotes, or in a quote that the line leaves open
_LITERAL = re.compile(r"\"(?:[^\"\\]|\\.){6,}\"|'(?:[^'\\]|\\.){6,}'|`[^`]{6,}`|\"\"\"|'''")
# after a strong word: what is set (`password: x`, `PASSWORD=x`, `<password>x`) or given (`--password x`, `password x1`)
_SET = re.compile(r"[:=>]\s*\S.{5,}")
_GIVEN = re.compile(
    r"(?i:((?<![\w-])--?[\w-]*(?<!max-)(key|token|secret|passw(or)?d|pwd|auth)s?[\s=]+"
    r"|\s(-u|--user)[\s=]+[^\s:]*:|^\s*ENV\s+\w*(key|token|secret|passw)\w*\s+)[^\s\"']{6,})"
)
_TOLD = re.compile(r"(?i:passw(or)?d|passphrase|secret|login)\s+(?=\S*\d)\S{6,}")
# after a weak one: no counts, no calls
_TOKEN_SET = re.compile(
    rf"(?i:{_TOKEN}(?!s?[\w-]*[\"']?\s*[:=]\s*[\d_.*+ ]{{,9}}$)[\w-]*[\"'\]]*\s*[:=]+>?\s*"
    r"((?=\S*[0-9])(?=\S*[A-Za-z])[^\s\"'()\[\]{}]{8,}|[^\s\"'(),.\[\]{}]{6,}\s*;?$))|TOKEN=\S{6,}"
)
_FORM = re.compile(
    # OpenAI, Stripe, GitHub, GitLab, Hugging Face, AWS, Slack, Google, JSON web tokens
    r"\b[srp]k[-_][A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bhf_[A-Za-z0-9]{16,}|\b(AKIA|ASIA)[A-Z0-9]{12,}|\bxox[abeprs]-[\w-]{10,}|hooks\.slack\.com/|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}|(?i:\bbearer)\s+[\w.~+/-]{16,}"
    r"|(?i:(?<![A-Za-z])key[\"'\]]*\s*[:=]\s*[\"'](?=[^\"']*[0-9])(?=[^\"']*[a-z])[^\s\"']{12,}[\"'])"
    # user:password, or a token, in a URL; a signature behind it
    r"|://[^\s\"'/@]*:[^\s\"'@]+@|://[^\s\"'/@:]{12,}@|[?&](sig|signature|key|auth)=[^\s\"'&]{6,}"
    # digests and keys in hex, but not the commits of submodules nor `sha256:...`
    r"|(?:[\"'`]|(?<!\d)[:=]\s*)(?:[0-9a-fA-F]{32}|[0-9a-fA-F]{40}|[0-9a-fA-F]{64})(?:[\"'`]|\s*$)"
    # long literals without a word in them, and what base64 is made of, upper and lower case and digits among it
    r"|[\"'`][A-Za-z0-9]{32,}={0,2}[\"'`]"
    r"|[\"'`](?=[^\"'`]*[A-Z])(?=[^\"'`]*[a-z])(?=[^\"'`]*[0-9])[\w+/=.~-]{32,}[\"'`]"
    r"|(?<![\w+/-])(?=[\w+/-]*[A-Z])(?=[\w+/-]*[a-z])(?=[\w+/-]*[0-9])[\w+/-]{40,}"
)
# the value comes on one of the next lines: `PASSWORD = (`, `password: |`, `"--password",`, `name: API_KEY`
_OPEN = re.compile(r"([(\[{=:\\]|[|>][-+]?)\s*$|[\w\]][\"']\s*,\s*$")
_ENDS = re.compile(r"[\w-]*[\"'\])]*\s*,?\s*$")
_AWAITED = re.compile(_LITERAL.pattern + r"|(^|[:=])[\s-]*[^\s\"'()\[\]{}]{6,}\s*$")
_AWAITED_LINES = 3


def looks_secret(path: str) -> bool:
    """Returns whether a file's name, or that of a folder it lies in, looks as if it held secrets."""
    return any(_NAME.fullmatch(part) for part in path.lower().split("/"))


class SecretLines:
    """Tells which of the lines of a hunk look like secrets; they are to be given in their order."""

    def __init__(self) -> None:
        self._in_key = False  # between the lines BEGIN and END of a private key
        self._awaited = 0  # how many more lines may hold the value that a line before has announced

    def hides(self, line: str) -> bool:
        """Returns whether the next line, without the mark of the diff before it, looks like a secret."""
        if "PRIVATE KEY" in line and ("BEGIN" in line or "END" in line):
            self._in_key = "END" not in line
            return True
        strong, weak = _STRONG.search(line), _WEAK.search(line)
        hidden = (
            self._in_key
            or (self._awaited > 0 and _AWAITED.search(line) is not None)
            or any(form.search(line) for form in (_FORM, _GIVEN, _TOLD, _TOKEN_SET))
            # the words often stand in quotes themselves: what is behind the first one counts, whatever is between
            or (weak is not None and _LITERAL.search(line, weak.end()) is not None)
            or (strong is not None and bool(_SET.search(line, strong.end()) or _LITERAL.search(line)))
        )
        opens = any(word is not None and _OPEN.search(line, word.end()) for word in (strong, weak))
        opens = opens or any(_ENDS.match(line, word.end()) for word in _STRONG.finditer(line))
        self._awaited = _AWAITED_LINES if opens else max(0, self._awaited - 1)
        return hidden
