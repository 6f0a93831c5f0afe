# Run by the build: writes OUTPUT, a source file with the build's name: VERSION and a digest over the files in the list FILES.
# Paths are not part of it, so that the same sources in two folders are one build.
file(STRINGS "${FILES}" sources)
set(text "")
foreach(source IN LISTS sources)
  file(SHA256 "${source}" digest)
  string(APPEND text "${digest}\n")
endforeach()
string(SHA256 digest "${text}")
string(SUBSTRING "${digest}" 0 12 digest)
file(WRITE "${OUTPUT}" "extern \"C\" const char hc_build_name[];\nconst char hc_build_name[] = \"${VERSION}+${digest}\";\n")
