"""headgate together with other libraries: HTTP clients, SDKs of providers, rate limits in headers, web services.

No module here imports such a library when it is imported: most work on whatever object has the right shape, and the
few that need the library import it when they are called.
"""
