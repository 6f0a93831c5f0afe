"""The page of `horoclonerun --dashboard`: server.py serves it, web/ is what the browser gets.

Needs starlette and uvicorn.
"""
