"""An engine that counts its requests."""

from ludus.training.run.session import local_engine


def counting(session):
    engine = local_engine(session)
    plain, engine.requests = engine.generate, 0

    async def generate(request):
        engine.requests += 1
        return await plain(request)

    engine.generate = generate
    return engine
