"""A proxy that holds API keys and rotates them for programs in any language: `headgate serve-keys`.

rules, tokens, headers     decide, without a loop: which requests are accepted, and which headers go on
error_texts                takes keys out of what an upstream writes about errors
app                        the ASGI application: reads a request, waits for its turn, passes the answer on
serving                    the server (uvicorn), its time limits for slow clients, and its end
"""

from headgate.integrations.keys_proxy.app import KeysProxy, Limits
from headgate.integrations.keys_proxy.rules import INFERENCE_PATHS, ProxyRules
from headgate.integrations.keys_proxy.tokens import Client, Tokens

__all__ = ["INFERENCE_PATHS", "Client", "KeysProxy", "Limits", "ProxyRules", "Tokens"]
