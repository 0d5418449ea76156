"""Trust on a broker that is not trusted: identities, invitations, sealed packets, guards on values."""

from .channel import Channel
from .death import Death, read_death, sign_death
from .errors import TrustError
from .guards import Guards, GuardSettings
from .identity import Identity, id_of, peer_id, public_text, read_labelled, read_public
from .invitation import (
    Admission,
    Terms,
    endorse,
    invite,
    open_ticket,
    read_terms,
    save_invitation,
    save_ticket,
)
from .keyring import OVERHEAD, Keyring
from .opened import Opened
from .opinion import FirstOpinion, Formed
from .register import Member, Register, read_published
from .revocation import Revocations, revocation_topic
from .trust import Trust
from .trusting import Heard, NoTrust, Trusting

__all__ = [
    "OVERHEAD",
    "Admission",
    "Channel",
    "Death",
    "FirstOpinion",
    "Formed",
    "GuardSettings",
    "Guards",
    "Heard",
    "Identity",
    "Keyring",
    "Member",
    "NoTrust",
    "Opened",
    "Register",
    "Revocations",
    "Terms",
    "Trust",
    "TrustError",
    "Trusting",
    "endorse",
    "id_of",
    "invite",
    "open_ticket",
    "peer_id",
    "public_text",
    "read_death",
    "read_labelled",
    "read_public",
    "read_published",
    "read_terms",
    "revocation_topic",
    "save_invitation",
    "save_ticket",
    "sign_death",
]
