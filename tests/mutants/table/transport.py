"""Mutants of what carries messages: links, TCP, TLS, shared memory, the virtual network, and what they let in."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "a-certificate-of-another-role-will-do",
        "Between machines every link is TLS 1.3",
        "transport/tls.py",
        "if isinstance(message, Hello) and message.role != link.socket.peer:",
        "if isinstance(message, Hello) and not link.socket.peer:",
        ("tests/processes/test_tls.py::test_who_cannot_prove_his_role_is_refused",),
        seconds=10,
    ),
]
